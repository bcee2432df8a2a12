// What Python calls: torch.ops.emu.
#pragma once

#include "collectives.h"
#include "guard.h"
#include "host.h"

namespace {

void start() {
  {
    std::lock_guard<std::mutex> guard(log_mutex);
    lines.clear();
  }
  forget_clocks();
  logging = true;
  log_live_blocks();
}

void stop() { logging = false; }
bool recording() { return logging; }

std::string text_of_log() {
  std::lock_guard<std::mutex> guard(log_mutex);
  std::string all;
  for (const auto& line : lines) all += line.text + "\n";
  return all;
}

// Innermost frame first: "file:line function".
std::vector<std::string> stack_of_line(int64_t number) {
  auto captured = lines.at(number).stack;
  std::vector<std::string> found;
  if (!captured) return found;
  auto symbols = torch::symbolize({captured.get()});
  for (auto index : symbols.tracebacks.at(0)) {
    const auto& frame = symbols.all_frames.at(index);
    found.push_back(frame.filename + ":" + std::to_string(frame.lineno) + " " + frame.funcname);
  }
  return found;
}

int64_t bytes_allocated(int64_t device) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  return allocated[device];
}

int64_t peak_of_bytes(int64_t device) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  return peak[device];
}

void reset_peak(int64_t device) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  peak[device] = allocated[device];
}

at::Generator generator_of_device(int64_t device) { return default_generator(static_cast<int>(device)); }

TORCH_LIBRARY(emu, m) {
  m.def("start", &start);
  m.def("stop", &stop);
  m.def("recording", &recording);
  m.def("log", &text_of_log);
  m.def("stack", &stack_of_line);
  m.def("host_reads(Tensor t, str name) -> ()", &host_reads);
  m.def("default_generator", &generator_of_device);
  m.def("bytes_allocated", &bytes_allocated);
  m.def("peak_of_bytes", &peak_of_bytes);
  m.def("reset_peak", &reset_peak);
  m.def("add_backend", &add_backend);
}

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::SetAllocator(EMU, &emu_allocator);
  pinned_memory_came_or_went(false);
  return true;
}();

} // namespace
