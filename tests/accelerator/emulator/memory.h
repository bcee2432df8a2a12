// Memory of the device and pinned memory. Each allocation is a Block, with a number that is never used again.
#pragma once

#include "streams.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/version.h>

#include <cstring>

namespace {

using at::Tensor;

struct Block {
  int64_t id;
  c10::Storage cpu; // the same memory, for CPU kernels, which never resize it
  int device = -1;  // -1: pinned
  Key stream{0, 0};
  int64_t bytes() const { return static_cast<int64_t>(cpu.nbytes()); }
};

std::mutex memory_mutex; // of all below
std::map<int64_t, Block*> live;
std::map<const char*, Block*> pinned; // by the first byte
int64_t allocated[DEVICES] = {};
int64_t peak[DEVICES] = {};

void pinned_memory_came_or_went(bool any); // host.h

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    std::lock_guard<std::mutex> guard(memory_mutex);
    live.erase(block->id);
    allocated[block->device] -= block->bytes();
  }
  log_line("free\t" + std::to_string(block->id));
  delete block;
}

Block* block_of(const c10::DataPtr& data) {
  return data.get_deleter() == &free_block ? static_cast<Block*>(data.get_context()) : nullptr;
}
Block* block_of(const c10::Storage& storage) { return block_of(storage.data_ptr()); }

// Memory that CPU kernels have made, or cpu_memory() has, as memory of the device.
c10::DataPtr adopt(c10::Storage cpu, int device) {
  cpu.unsafeGetStorageImpl()->set_resizable(false);
  auto* block = new Block{next_id++, std::move(cpu), device, current_key(device)};
  {
    std::lock_guard<std::mutex> guard(memory_mutex);
    live[block->id] = block;
    allocated[device] += block->bytes();
    peak[device] = std::max(peak[device], allocated[device]);
  }
  log_line("alloc\t" + std::to_string(block->id) + "\t" + block->stream.name() + "\t" + std::to_string(block->bytes()));
  return {block->cpu.data_ptr().get(), block, &free_block, emu(device)};
}

// The lines for what is allocated when a recording starts.
void log_live_blocks() {
  std::lock_guard<std::mutex> guard(memory_mutex);
  for (const auto& [id, block] : live)
    log_line("live\t" + std::to_string(id) + "\t" + block->stream.name() + "\t" + std::to_string(block->bytes()), false);
}

c10::Storage cpu_memory(size_t bytes) {
  auto data = c10::GetAllocator(c10::kCPU)->allocate(bytes);
  if (bytes) std::memset(data.get(), 0xff, bytes); // NaN: nobody may count on what empty() returns
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(data), nullptr, /*resizable=*/false);
}

void keep_for(const c10::DataPtr& data, const Key& key) {
  if (const auto* block = block_of(data)) log_line("keep\t" + std::to_string(block->id) + "\t" + key.name(), false);
}

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 9
#define EMULATOR_STATISTICS
using AllocatorBase = c10::DeviceAllocator;
#else
using AllocatorBase = c10::Allocator;
#endif

struct EmuAllocator final : AllocatorBase {
  c10::DataPtr allocate(size_t bytes) override { return adopt(cpu_memory(bytes), current_device); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
#ifdef EMULATOR_STATISTICS
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { keep_for(data, key_of(stream)); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(memory_mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      auto& all = (*bytes)[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
      all.current = allocated[device];
      all.peak = peak[device];
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(memory_mutex);
    peak[device] = allocated[device];
  }
#endif
} emu_allocator;

// A pinned block may be freed while a copy uses it: as in torch, whose caching host allocator waits for the copies.
void free_pinned(void* context) {
  auto* block = static_cast<Block*>(context);
  bool any = false;
  {
    std::lock_guard<std::mutex> guard(memory_mutex);
    pinned.erase(static_cast<const char*>(block->cpu.data_ptr().get()));
    any = !pinned.empty();
  }
  pinned_memory_came_or_went(any);
  delete block;
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* block = new Block{next_id++, cpu_memory(std::max<size_t>(bytes, 1))};
    void* data = block->cpu.data_ptr().get();
    {
      std::lock_guard<std::mutex> guard(memory_mutex);
      pinned[static_cast<const char*>(data)] = block;
    }
    pinned_memory_came_or_went(true);
    return {data, block, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} pinned_allocator;

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  auto found = pinned.upper_bound(static_cast<const char*>(data));
  if (found == pinned.begin()) return false;
  --found;
  return static_cast<const char*>(data) < found->first + found->second->bytes();
}

Block* pinned_block_of(const Tensor& t) {
  if (!t.defined() || !t.device().is_cpu() || !t.has_storage()) return nullptr;
  const auto& data = t.storage().data_ptr();
  return data.get_deleter() == &free_pinned ? static_cast<Block*>(data.get_context()) : nullptr;
}

// What a kernel touches of a block: "block:from-to,", in bytes, from the tensor's first byte to its last.
std::string span(const Block* block, const Tensor& t) {
  if (block == nullptr || !logging || t.numel() == 0) return "";
  int64_t last = t.storage_offset();
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  const auto item = static_cast<int64_t>(t.itemsize());
  return std::to_string(block->id) + ":" + std::to_string(t.storage_offset() * item) + "-" +
      std::to_string((last + 1) * item) + ",";
}

std::string spans(const std::vector<Tensor>& all) {
  std::string found;
  for (const Tensor& t : all) found += span(block_of(t.storage()), t);
  return found;
}

// A storage of another size, and the bytes that both sizes have.
void resize_storage(const c10::Storage& storage, size_t bytes) {
  c10::DeviceGuard on_its_device(storage.device());
  const auto kept = std::min(storage.nbytes(), bytes);
  c10::DataPtr data = adopt(cpu_memory(bytes), storage.device().index());
  if (kept > 0) {
    const auto key = current_key(storage.device().index());
    drain(key);
    std::memcpy(data.get(), storage.data(), kept);
    const auto range = ":0-" + std::to_string(kept) + ",";
    log_kernel(key, "resize_", std::to_string(block_of(storage)->id) + range,
               std::to_string(block_of(data)->id) + range);
  }
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

} // namespace
