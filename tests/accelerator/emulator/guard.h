// What torch asks of a device: its streams, events, current device, pinned memory and generators.
#pragma once

#include "generators.h"
#include "memory.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

// torch 2.6 says of some that they raise nothing.
#define EMULATOR_AS_DECLARED(call) noexcept(noexcept(std::declval<const c10::impl::DeviceGuardImplInterface&>().call))

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return EMU; }
  c10::Device exchangeDevice(c10::Device d) const override {
    const auto before = emu(-1);
    setDevice(d);
    return before;
  }
  c10::Device getDevice() const override { return emu(-1); }
  void setDevice(c10::Device d) const override {
    TORCH_CHECK(d.index() < DEVICES, "emu has ", DEVICES, " devices, so there is no ", d);
    uncheckedSetDevice(d);
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.index() >= 0) current_device = d.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }

  static c10::Stream stream(c10::Device d, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, emu(d.index()), id);
  }
  c10::Stream getStream(c10::Device d) const EMULATOR_AS_DECLARED(getStream(d)) override { return stream(d, current_key(d.index()).id); }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream(d, 0); }
  // CUDA's pool gives a stream out again after 32 others, which would hide what is not ordered.
  c10::Stream getNewStream(c10::Device d, int) const override { return stream(d, next_stream++); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return stream(d, next_stream++); }
  c10::Stream exchangeStream(c10::Stream s) const EMULATOR_AS_DECLARED(exchangeStream(s)) override {
    const auto before = getStream(s.device());
    current_streams[s.device_index()] = s.id();
    return before;
  }
  bool queryStream(const c10::Stream& s) const override { return query(key_of(s)); }
  void synchronizeStream(const c10::Stream& s) const override { host_waits(key_of(s), "synchronize"); }
  void synchronizeDevice(const c10::DeviceIndex d) const override { host_waits_for_device(d < 0 ? current_device : d); }

  static Recording& recording(void* event) { return *static_cast<Recording*>(event); }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Recording;
    ::record(recording(*event), key_of(s));
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event != nullptr) ::wait(recording(event), key_of(s));
  }
  bool queryEvent(void* event) const override { return event == nullptr || query(recording(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) host_waits(recording(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Recording*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    const std::chrono::duration<double, std::milli> passed = recording(second).time - recording(first).time;
    return passed.count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    keep_for(data, key_of(s));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const { return true; } // these two override in newer versions of torch
  bool isAvailable() const { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(c10::DeviceIndex d) const override { Guard().setDevice(emu(d)); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    return Guard().exchangeDevice(c10::Device(EMU, d)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchangeDevice(d); }
  at::Device getDeviceFromPtr(void*) const override { return emu(-1); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(c10::DeviceIndex d) const override { return at::make_generator<EmuGenerator>(d); }
};

} // namespace
