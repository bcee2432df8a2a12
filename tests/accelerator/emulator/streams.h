// Streams and events: what each is ordered after, what the host has waited for, and which collectives are unfinished.
#pragma once

#include "interpreter.h"
#include "log.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <chrono>
#include <map>

namespace {

constexpr auto EMU = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2;

thread_local int current_device = 0;
thread_local int64_t current_streams[DEVICES] = {}; // the id of each device's current stream; 0 is its default stream
std::atomic<int64_t> next_stream{1};

c10::Device emu(int index) { return c10::Device(EMU, static_cast<c10::DeviceIndex>(index < 0 ? current_device : index)); }

struct Key {
  int device;
  int64_t id;
  bool operator<(const Key& other) const { return std::tie(device, id) < std::tie(other.device, other.id); }
  std::string name() const { return std::to_string(device) + "." + std::to_string(id); }
};

Key key_of(const c10::Stream& s) { return {s.device_index(), s.id()}; }
Key current_key(int device) {
  const int index = device < 0 ? current_device : device;
  TORCH_CHECK(index < DEVICES, "emu has ", DEVICES, " devices, so there is no emu:", index);
  return {index, current_streams[index]};
}

// A collective that was launched. Nothing that is ordered after it may run before finish() has returned.
struct Pending {
  virtual ~Pending() = default;
  virtual void finish() = 0; // waits for the other ranks; raises what went wrong
};
using Pendings = std::vector<std::shared_ptr<Pending>>;

void add(Pendings& to, const Pendings& more) {
  for (const auto& one : more)
    if (std::find(to.begin(), to.end(), one) == to.end()) to.push_back(one);
}

using Clock = std::map<Key, int64_t>; // for each stream the number of the last launch that is over by then

struct StreamState {
  Clock reached;
  Pendings pending;
  int64_t asked = 0; // the last launch when the stream was last queried
};

struct Recording {
  int64_t id = 0; // 0: never recorded
  Key stream{0, 0};
  int64_t number = 0;
  Clock reached;
  Pendings pending;
  bool asked = false;
  std::chrono::steady_clock::time_point time;
};

std::mutex streams_mutex; // of all below
std::map<Key, StreamState> streams;
Clock host;               // what the host has waited for
int64_t launches = 0;
int64_t all_over = 0;     // launches up to this one count as over

void join(Clock& clock, const Clock& other) {
  for (const auto& [key, number] : other) {
    if (number <= all_over) continue;
    auto& mine = clock[key];
    mine = std::max(mine, number);
  }
}

bool host_has_waited(const Key& key, int64_t number) {
  if (number <= all_over) return true;
  const auto found = host.find(key);
  return found != host.end() && found->second >= number;
}

int64_t launched(StreamState& state, const Key& key) { return state.reached[key] = ++launches; }

// A recording starts: whatever was launched before counts as over, so that clocks stay small.
void forget_clocks() {
  std::lock_guard<std::mutex> guard(streams_mutex);
  all_over = launches;
  host.clear();
  for (auto& [key, state] : streams) state.reached.clear();
}

// Block until the collectives that the stream is ordered after are finished. Raises the first error, once.
void drain(const Key& key) {
  Pendings waited;
  {
    std::lock_guard<std::mutex> guard(streams_mutex);
    waited = streams[key].pending;
  }
  if (waited.empty()) return;
  std::exception_ptr error;
  {
    WithoutGil released;
    for (const auto& one : waited) {
      try {
        one->finish();
      } catch (...) {
        if (!error) error = std::current_exception();
      }
    }
  }
  {
    std::lock_guard<std::mutex> guard(streams_mutex);
    auto& left = streams[key].pending;
    left.erase(std::remove_if(left.begin(), left.end(),
                              [&](const auto& one) {
                                return std::find(waited.begin(), waited.end(), one) != waited.end();
                              }),
               left.end());
  }
  if (error) std::rethrow_exception(error);
}

// Write down a kernel. Who calls has drained the stream, unless the kernel is a collective.
void log_kernel(const Key& key, const std::string& name, const std::string& reads, const std::string& writes) {
  {
    std::lock_guard<std::mutex> guard(streams_mutex);
    launched(streams[key], key);
  }
  if (!logging) return;
  auto node = torch::autograd::get_current_node();
  log_line("op\t" + key.name() + "\t" + name + "\t" + reads + "\t" + writes + "\t" + (node ? node->name() : ""));
}

// The host waits for all that a stream holds.
void host_waits(const Key& key, const std::string& why, const char* kind = "hostwait") {
  drain(key);
  {
    std::lock_guard<std::mutex> guard(streams_mutex);
    auto found = streams.find(key);
    if (found != streams.end()) join(host, found->second.reached);
  }
  log_line(std::string(kind) + "\t" + key.name() + "\t" + why);
}

void host_waits_for_device(int device) {
  std::vector<Key> all;
  {
    std::lock_guard<std::mutex> guard(streams_mutex);
    for (const auto& [key, state] : streams)
      if (key.device == device) all.push_back(key);
  }
  for (const auto& key : all) drain(key);
  {
    std::lock_guard<std::mutex> guard(streams_mutex);
    for (const auto& key : all) join(host, streams[key].reached);
  }
  log_line("hostwait\t" + std::to_string(device) + ".*\tsynchronize");
}

bool query(const Key& key) {
  {
    std::lock_guard<std::mutex> guard(streams_mutex);
    auto& state = streams[key];
    const auto last = state.reached.count(key) ? state.reached[key] : 0;
    if (host_has_waited(key, last)) return true;
    if (state.asked != last) {
      state.asked = last;
      return false;
    }
  }
  host_waits(key, "query", "query");
  return true;
}

void record(Recording& event, const Key& key) {
  {
    std::lock_guard<std::mutex> guard(streams_mutex);
    auto& state = streams[key];
    event.id = next_id++;
    event.stream = key;
    event.number = launched(state, key);
    event.reached = {};
    join(event.reached, state.reached);
    event.pending = state.pending;
    event.asked = false;
    event.time = std::chrono::steady_clock::now();
  }
  log_line("record\t" + std::to_string(event.id) + "\t" + key.name(), false);
}

void wait(const Recording& event, const Key& key) {
  if (event.id == 0) return;
  {
    std::lock_guard<std::mutex> guard(streams_mutex);
    auto& state = streams[key];
    launched(state, key);
    join(state.reached, event.reached);
    add(state.pending, event.pending);
  }
  log_line("wait\t" + std::to_string(event.id) + "\t" + key.name(), false);
}

void host_waits(Recording& event, const char* kind = "hostwaitevent") {
  if (event.id == 0) return;
  const auto pending = std::exchange(event.pending, {});
  if (!pending.empty()) {
    WithoutGil released;
    for (const auto& one : pending) one->finish();
  }
  {
    std::lock_guard<std::mutex> guard(streams_mutex);
    join(host, event.reached);
  }
  log_line(std::string(kind) + "\t" + std::to_string(event.id));
}

bool query(Recording& event) {
  if (event.id == 0) return true;
  {
    std::lock_guard<std::mutex> guard(streams_mutex);
    if (host_has_waited(event.stream, event.number)) return true;
  }
  if (!std::exchange(event.asked, true)) return false;
  host_waits(event, "queryevent");
  return true;
}

} // namespace
