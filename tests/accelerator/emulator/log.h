// The log: one line of tab-separated fields for each thing that is launched or that the host does, and its Python stack.
#pragma once

#include <torch/csrc/profiler/combined_traceback.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {

struct Line {
  std::string text;
  std::shared_ptr<torch::CapturedTraceback> stack; // gathered here, symbolized only for what is reported
};
std::mutex log_mutex;
std::vector<Line> lines;
std::atomic<bool> logging{false};
std::atomic<int64_t> next_id{1}; // of blocks and of recordings of events; never used twice
thread_local bool silent = false; // while the emulation itself uses CPU tensors

struct Silence {
  bool before = std::exchange(silent, true);
  ~Silence() { silent = before; }
};

void log_line(std::string text, bool with_stack = true) {
  if (!logging) return;
  std::shared_ptr<torch::CapturedTraceback> stack;
  if (with_stack) stack = torch::CapturedTraceback::gather(/*python=*/true, /*script=*/false, /*cpp=*/false);
  std::lock_guard<std::mutex> guard(log_mutex);
  lines.push_back({std::move(text), std::move(stack)});
}

} // namespace
