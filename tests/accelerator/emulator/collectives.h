// Collectives with NCCL's manners: a launch returns at once, and runs on the group's own stream, after what the current
// stream holds; Work.wait() has the current stream wait. The group's own thread has another backend carry the bytes.
#pragma once

#include "kernels.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <condition_variable>
#include <deque>
#include <thread>

namespace {

using Tensors = std::vector<Tensor>;
using Works = c10::intrusive_ptr<c10d::Work>;

struct Task final : Pending {
  Pendings after;
  std::function<Works()> carry; // returns what is still to be waited for, or nothing
  bool point_to_point = false;

  void run() {
    try {
      for (const auto& one : after) one->finish();
      Silence here;
      at::AutoDispatchBelowADInplaceOrView below;
      auto work = carry();
      if (work && !point_to_point) std::exchange(work, {})->wait();
      end(std::move(work), nullptr);
    } catch (...) {
      end({}, std::current_exception());
    }
  }
  void end(Works work, std::exception_ptr with) {
    {
      std::lock_guard<std::mutex> guard(mutex);
      if (over) return;
      left = std::move(work);
      error = std::move(with);
      over = true;
      after.clear();
      carry = nullptr;
    }
    changed.notify_all();
  }
  void finish() override {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return over; });
    if (left) {
      try {
        std::exchange(left, {})->wait();
      } catch (...) {
        error = std::current_exception();
      }
    }
    if (error) std::rethrow_exception(error);
  }
  std::exception_ptr failure() {
    std::lock_guard<std::mutex> guard(mutex);
    return error;
  }

  std::mutex mutex;
  std::condition_variable changed;
  bool over = false;
  Works left;
  std::exception_ptr error;
};

// The group's thread and what it has to do. It outlives the group where it waits for a rank that never comes.
struct Carrier : std::enable_shared_from_this<Carrier> {
  explicit Carrier(c10::intrusive_ptr<c10d::Backend> gloo) : gloo(std::move(gloo)) {}

  void start() {
    std::thread([self = shared_from_this()] { self->serve(); }).detach();
  }
  void serve() {
    while (true) {
      std::shared_ptr<Task> task;
      {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return closed || !tasks.empty(); });
        if (tasks.empty()) return;
        task = tasks.front();
      }
      task->run();
      {
        std::lock_guard<std::mutex> guard(mutex);
        if (!tasks.empty() && tasks.front() == task) tasks.pop_front();
      }
      changed.notify_all();
    }
  }
  void add(std::shared_ptr<Task> task) {
    {
      std::lock_guard<std::mutex> guard(mutex);
      if (closed) {
        task->end({}, gone());
        std::rethrow_exception(gone());
      }
      if (task->point_to_point) sent.push_back(task);
      tasks.push_back(std::move(task));
    }
    changed.notify_all();
  }
  // ``grace``: how long what is launched may still take. What has not begun by then fails.
  void close(std::chrono::milliseconds grace) {
    WithoutGil released;
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait_for(lock, grace, [&] { return tasks.empty(); });
    closed = true;
    auto left = std::exchange(tasks, {});
    lock.unlock();
    changed.notify_all();
    for (const auto& task : left) task->end({}, gone());
  }
  static std::exception_ptr gone() {
    return std::make_exception_ptr(std::runtime_error("the process group was destroyed or aborted"));
  }

  c10::intrusive_ptr<c10d::Backend> gloo;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Task>> tasks;
  std::vector<std::shared_ptr<Task>> sent; // gloo's buffers of sends and receives that nobody waits for
  bool closed = false;
};

// What keeps a collective's tensors from the allocator until somebody waits for the collective.
using Shelf = std::shared_ptr<Tensors>;

struct EmuWork final : c10d::Work {
  EmuWork(int rank, c10d::OpType type, c10::Device device) : Work(rank, type), device(device), future(make_future()) {}
  c10::intrusive_ptr<c10::ivalue::Future> make_future() const {
    return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(), std::vector<c10::Device>{device});
  }
  bool isCompleted() override { return failed() || query(end); }
  bool isSuccess() const override { return !failed(); }
  std::exception_ptr exception() const override { return task ? task->failure() : nullptr; }
  bool failed() const { return exception() != nullptr; }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds) override {
    if (auto error = exception()) std::rethrow_exception(error);
    const auto key = current_key(device.index());
    ::wait(end, key);
    if (shelf) shelf->clear();
    if (is_barrier) host_waits(key, "barrier");
    return true;
  }
  Tensors result() override { return future->value().toTensorVector(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }

  c10::Device device;
  c10::intrusive_ptr<c10::ivalue::Future> future; // with an event on the stream of the collective
  Recording end;
  Shelf shelf;
  std::shared_ptr<Task> task;
  bool is_barrier = false;
};

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 8
#define EMULATOR_ASYNC(o) (o).asyncOp
#else
#define EMULATOR_ASYNC(o) true
#endif

// As NCCL: until torch 2.8 each collective told the allocator of its stream, and since then only when it is asked to.
bool records_streams() {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 8
  constexpr bool by_default = false;
#else
  constexpr bool by_default = true;
#endif
  const char* avoid = std::getenv("TORCH_NCCL_AVOID_RECORD_STREAMS");
  return avoid == nullptr ? by_default : std::string(avoid) == "0";
}

// gloo has neither a mean nor a factor.
struct Reduction {
  c10d::ReduceOp op;
  int size;
  c10d::ReduceOp of_gloo() const {
    return is(c10d::ReduceOp::AVG) || is(c10d::ReduceOp::PREMUL_SUM) ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
  }
  void before(Tensor& t) const {
    if (!is(c10d::ReduceOp::PREMUL_SUM)) return;
    const auto* by = static_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
    by->tensor_factor.defined() ? t.mul_(on_emu(by->tensor_factor) ? cpu_alias(by->tensor_factor) : by->tensor_factor)
                                : t.mul_(by->double_factor);
  }
  void after(Tensor& t) const {
    if (is(c10d::ReduceOp::AVG)) t.div_(size);
  }
  bool is(c10d::ReduceOp::RedOpType type) const { return op.op_ == type; }
};

struct Launch {
  const char* name;
  c10d::OpType type;
  Tensors reads, writes, result;
  bool async = true; // else on the current stream, as NCCL does since torch 2.8
  bool point_to_point = false;
};

struct EmuBackend final : c10d::Backend {
  explicit EmuBackend(const c10::intrusive_ptr<c10d::Backend>& gloo)
      : Backend(gloo->getRank(), gloo->getSize()), carrier(std::make_shared<Carrier>(gloo)) {
    carrier->start();
  }
  ~EmuBackend() override { carrier->close(std::chrono::seconds(0)); }
  const std::string getBackendName() const override { return "emu"; }
  // The next ones override in newer versions of torch.
  void shutdown() { carrier->close(std::chrono::seconds(2)); }
  void abort() { carrier->close(std::chrono::seconds(0)); }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 8
  void setTimeout(std::chrono::milliseconds timeout) { carrier->gloo->setTimeout(timeout); }
#endif
  c10::intrusive_ptr<Options> getBackendOptions() { return c10::make_intrusive<Options>("emu"); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence; }
  bool supportsCoalescing() const { return true; }

  const std::shared_ptr<Carrier> carrier;
  std::map<int, Key> streams_of_devices;
  std::mutex shelves_mutex;
  std::vector<std::tuple<Key, int64_t, Shelf>> shelves; // of works that may be dropped without a wait
  uint64_t sequence = 0;
  bool coalescing = false;
  c10::intrusive_ptr<EmuWork> coalesced;

  Key stream_of(int device) {
    auto found = streams_of_devices.find(device);
    if (found == streams_of_devices.end()) found = streams_of_devices.emplace(device, Key{device, next_stream++}).first;
    return found->second;
  }

  // A dropped work's tensors are kept until the host knows that it is over.
  void clear_shelves() {
    std::lock_guard<std::mutex> guard(shelves_mutex);
    std::vector<std::tuple<Key, int64_t, Shelf>> left;
    for (auto& [key, number, shelf] : shelves) {
      std::lock_guard<std::mutex> of_streams(streams_mutex);
      if (!shelf->empty() && !host_has_waited(key, number)) left.emplace_back(key, number, shelf);
    }
    shelves.swap(left); // frees tensors, which writes lines of its own
  }

  Works launch(Launch what, std::function<Works()> carry) {
    ++sequence;
    clear_shelves();
    const auto device = (what.writes.empty() ? what.reads : what.writes).at(0).device();
    c10::DeviceGuard guard(device);
    const auto current = current_key(device.index());
    const auto mine = what.async ? stream_of(device.index()) : current;
    if (what.async) {
      Recording launched;
      record(launched, current);
      ::wait(launched, mine);
    }
    auto task = std::make_shared<Task>();
    task->point_to_point = what.point_to_point;
    task->carry = std::move(carry);
    {
      std::lock_guard<std::mutex> of_streams(streams_mutex);
      auto& pending = streams[mine].pending;
      const auto& of_current = streams[current].pending;
      Pendings beside; // what a peer may have launched in another order: sends and receives do not wait for each other
      for (const auto& one : pending) {
        const auto* other = dynamic_cast<Task*>(one.get());
        const bool ordered = std::find(of_current.begin(), of_current.end(), one) != of_current.end();
        (what.point_to_point && what.async && !ordered && other && other->point_to_point ? beside : task->after)
            .push_back(one);
      }
      pending = std::move(beside);
      pending.push_back(task);
    }
    log_kernel(mine, what.name, spans(what.reads), spans(what.writes));

    auto work = c10::make_intrusive<EmuWork>(getRank(), what.type, device);
    work->task = task;
    record(work->end, mine);
    if (what.async) {
      Tensors used = what.reads;
      used.insert(used.end(), what.writes.begin(), what.writes.end());
      if (records_streams()) {
        for (const auto& t : used) keep_for(t.storage().data_ptr(), mine);
      } else {
        work->shelf = std::make_shared<Tensors>(std::move(used));
        std::lock_guard<std::mutex> of_shelves(shelves_mutex);
        shelves.emplace_back(mine, work->end.number, work->shelf);
      }
    }
    {
      const c10::StreamGuard on_mine(c10::Stream(c10::Stream::UNSAFE, device, mine.id));
      work->future->markCompleted(IValue(std::move(what.result)));
    }
    carrier->add(task);
    if (coalescing) coalesce(work);
    return work;
  }

  void coalesce(const c10::intrusive_ptr<EmuWork>& work) {
    if (coalesced) {
      if (coalesced->shelf && work->shelf)
        work->shelf->insert(work->shelf->end(), coalesced->shelf->begin(), coalesced->shelf->end());
    }
    coalesced = work;
  }
  void startCoalescing() override {
    coalescing = true;
    coalesced = {};
  }
  Works endCoalescing() override {
    coalescing = false;
    return std::exchange(coalesced, {}); // on its stream the last one is over after all others
  }

  // Tensors in host memory with the same bytes.
  static Tensors cpu(const Tensors& all) {
    Tensors made;
    for (const auto& t : all) made.push_back(cpu_alias(t));
    return made;
  }
  static std::vector<Tensors> cpu(const std::vector<Tensors>& all) {
    std::vector<Tensors> made;
    for (const auto& list : all) made.push_back(cpu(list));
    return made;
  }
  static Tensors flat(const std::vector<Tensors>& all) {
    Tensors made;
    for (const auto& list : all) made.insert(made.end(), list.begin(), list.end());
    return made;
  }

  template <typename Options, typename Reduce>
  std::function<Works()> reducing(Tensors in, Tensors out, Options o, Reduce reduce) {
    return [in = std::move(in), out = std::move(out), o, reduce, how = Reduction{o.reduceOp, getSize()}]() mutable {
      o.reduceOp = how.of_gloo();
      for (auto& t : in) how.before(t);
      reduce(in, o)->wait();
      for (auto& t : out) how.after(t);
      return Works();
    };
  }

  Works broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    const bool root = o.rootRank == getRank();
    return launch({"broadcast", c10d::OpType::BROADCAST, root ? t : Tensors(), root ? Tensors() : t, t,
                   EMULATOR_ASYNC(o)},
                  [c = cpu(t), o, gloo = carrier->gloo]() mutable { return gloo->broadcast(c, o); });
  }
  Works allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    auto c = cpu(t);
    return launch({"allreduce", c10d::OpType::ALLREDUCE, t, t, t, EMULATOR_ASYNC(o)},
                  reducing(c, c, o, [gloo = carrier->gloo](Tensors& in, const c10d::AllreduceOptions& with) {
                    return gloo->allreduce(in, with);
                  }));
  }
  Works allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    auto c = cpu(t);
    return launch({"allreduce_coalesced", c10d::OpType::COALESCED, t, t, t, EMULATOR_ASYNC(o)},
                  reducing(c, c, o, [gloo = carrier->gloo](Tensors& in, const c10d::AllreduceCoalescedOptions& with) {
                    return gloo->allreduce_coalesced(in, with);
                  }));
  }
  Works reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    const bool root = o.rootRank == getRank();
    Tensors in; // gloo writes what other ranks than the root have given
    for (const auto& one : cpu(t)) in.push_back(root ? one : one.clone());
    return launch({"reduce", c10d::OpType::REDUCE, t, root ? t : Tensors(), t, EMULATOR_ASYNC(o)},
                  reducing(in, in, o, [gloo = carrier->gloo](Tensors& all, const c10d::ReduceOptions& with) {
                    return gloo->reduce(all, with);
                  }));
  }
  Works allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return launch({"allgather", c10d::OpType::ALLGATHER, in, flat(out), flat(out), EMULATOR_ASYNC(o)},
                  [co = cpu(out), ci = cpu(in), o, gloo = carrier->gloo]() mutable {
                    return gloo->allgather(co, ci, o);
                  });
  }
  Works _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    TORCH_CHECK_VALUE(out.numel() == in.numel() * getSize(),
                      "output tensor size must be equal to world_size times input tensor size");
    return launch({"_allgather_base", c10d::OpType::_ALLGATHER_BASE, {in}, {out}, {out}, EMULATOR_ASYNC(o)},
                  [co = cpu_alias(out), ci = cpu_alias(in), o, gloo = carrier->gloo]() mutable {
                    auto flat_out = co.view(-1), flat_in = ci.view(-1); // NCCL compares the numbers of elements alone
                    return gloo->_allgather_base(flat_out, flat_in, o);
                  });
  }
  Works _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) override {
    TORCH_CHECK_VALUE(in.numel() == out.numel() * getSize(),
                      "input tensor must be the same size as output size times world size");
    return launch({"_reduce_scatter_base", c10d::OpType::_REDUCE_SCATTER_BASE, {in}, {out}, {out}, EMULATOR_ASYNC(o)},
                  scattering({cpu_alias(out)}, {cpu_alias(in)}, o));
  }
  Works reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::ReduceScatterOptions& o) override {
    return launch({"reduce_scatter_tensor_coalesced", c10d::OpType::COALESCED, ins, outs, outs, EMULATOR_ASYNC(o)},
                  scattering(cpu(outs), cpu(ins), o));
  }
  std::function<Works()> scattering(Tensors outs, Tensors ins, const c10d::ReduceScatterOptions& o) {
    return [outs, ins, scatter = scattering_with(o)] { return scatter(outs, ins); };
  }
  std::function<Works(const Tensors&, const Tensors&)> scattering_with(c10d::ReduceScatterOptions o) {
    const Reduction how{o.reduceOp, getSize()};
    o.reduceOp = how.of_gloo();
    return [o, how, gloo = carrier->gloo](const Tensors& outs, const Tensors& ins) {
      for (size_t i = 0; i < outs.size(); ++i) {
        auto in = ins[i].reshape(-1).clone(), out = outs[i].view(-1); // gloo writes its input
        how.before(in);
        gloo->_reduce_scatter_base(out, in, o)->wait();
        how.after(out);
      }
      return Works();
    };
  }
  Works reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& o) override {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 8 // gloo has none for lists
    return launch({"reduce_scatter", c10d::OpType::REDUCE_SCATTER, flat(in), out, out, EMULATOR_ASYNC(o)},
                  [scatter = scattering_with(o), co = cpu(out), ci = cpu(in)]() {
                    Tensors flat_in;
                    for (const auto& list : ci) {
                      Tensors parts;
                      for (const auto& part : list) parts.push_back(part.reshape(-1));
                      flat_in.push_back(at::cat(parts));
                    }
                    return scatter(co, flat_in);
                  });
#endif
    return launch({"reduce_scatter", c10d::OpType::REDUCE_SCATTER, flat(in), out, out, EMULATOR_ASYNC(o)},
                  [co = cpu(out), ci = cpu(in), o = c10d::ReduceScatterOptions(o), how = Reduction{o.reduceOp, getSize()},
                   gloo = carrier->gloo]() mutable {
                    o.reduceOp = how.of_gloo();
                    for (auto& list : ci) {
                      for (auto& part : list) {
                        part = part.clone();
                        how.before(part);
                      }
                    }
                    gloo->reduce_scatter(co, ci, o)->wait();
                    for (auto& t : co) how.after(t);
                    return Works();
                  });
  }
  Works allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& o) override {
    return launch({"allgather_into_tensor_coalesced", c10d::OpType::COALESCED, ins, outs, outs, EMULATOR_ASYNC(o)},
                  [co = cpu(outs), ci = cpu(ins), o, gloo = carrier->gloo]() mutable -> Works {
                    for (size_t i = 0; i < co.size(); ++i) {
                      auto flat_out = co[i].view(-1), flat_in = ci[i].view(-1);
                      gloo->_allgather_base(flat_out, flat_in, o)->wait();
                    }
                    return {};
                  });
  }
  Works alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& outs, std::vector<int64_t>& ins,
                      const c10d::AllToAllOptions& o) override {
    return launch({"alltoall_base", c10d::OpType::ALLTOALL_BASE, {in}, {out}, {out}, EMULATOR_ASYNC(o)},
                  [co = cpu_alias(out), ci = cpu_alias(in), outs, ins, o, gloo = carrier->gloo]() mutable {
                    return gloo->alltoall_base(co, ci, outs, ins, o);
                  });
  }
  Works alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& o) override {
    return launch({"alltoall", c10d::OpType::ALLTOALL, in, out, out, EMULATOR_ASYNC(o)},
                  [co = cpu(out), ci = cpu(in), o, gloo = carrier->gloo]() mutable -> Works {
                    Tensors flat_in, flat_out;
                    std::vector<int64_t> ins, outs;
                    for (const auto& t : ci) flat_in.push_back(t.reshape(-1)), ins.push_back(t.numel());
                    for (const auto& t : co) flat_out.push_back(t.reshape(-1)), outs.push_back(t.numel());
                    auto all_in = at::cat(flat_in), all_out = at::empty_like(at::cat(flat_out));
                    const auto sizes = outs; // gloo takes the others away
                    gloo->alltoall_base(all_out, all_in, outs, ins, o)->wait();
                    const auto parts = all_out.split_with_sizes(sizes);
                    for (size_t i = 0; i < co.size(); ++i) co[i].copy_(parts[i].view_as(co[i]));
                    return {};
                  });
  }
  Works gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& o) override {
    return launch({"gather", c10d::OpType::GATHER, in, flat(out), flat(out), EMULATOR_ASYNC(o)},
                  [co = cpu(out), ci = cpu(in), o, gloo = carrier->gloo]() mutable { return gloo->gather(co, ci, o); });
  }
  Works scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& o) override {
    return launch({"scatter", c10d::OpType::SCATTER, flat(in), out, out, EMULATOR_ASYNC(o)},
                  [co = cpu(out), ci = cpu(in), o, gloo = carrier->gloo]() mutable {
                    return gloo->scatter(co, ci, o);
                  });
  }
  Works send(Tensors& t, int to, int tag) override {
    return launch({"send", c10d::OpType::SEND, t, {}, t, true, true},
                  [c = cpu(t), to, tag, gloo = carrier->gloo]() mutable { return gloo->send(c, to, tag); });
  }
  Works recv(Tensors& t, int from, int tag) override {
    return launch({"recv", c10d::OpType::RECV, {}, t, t, true, true},
                  [c = cpu(t), from, tag, gloo = carrier->gloo]() mutable { return gloo->recv(c, from, tag); });
  }
  Works recvAnysource(Tensors& t, int tag) override {
    return launch({"recv", c10d::OpType::RECVANYSOURCE, {}, t, t, true, true},
                  [c = cpu(t), tag, gloo = carrier->gloo]() mutable { return gloo->recvAnysource(c, tag); });
  }
  // NCCL's is an allreduce of one element, which the host waits for.
  Works barrier(const c10d::BarrierOptions& o) override {
    auto device = emu(o.device_ids.empty() ? -1 : static_cast<int>(o.device_ids[0]));
    if (o.device && o.device->type() == EMU) device = emu(o.device->index());
    Tensors t{at::zeros({1}, at::TensorOptions().device(device))};
    auto work = launch({"barrier", c10d::OpType::BARRIER, t, t, t, EMULATOR_ASYNC(o)},
                       [gloo = carrier->gloo]() { return gloo->barrier(c10d::BarrierOptions()); });
    static_cast<EmuWork*>(work.get())->is_barrier = true;
    return work;
  }
};

// ``group`` is to do the device's collectives. Those of ``bytes``, whose backend for the CPU is gloo, carry them.
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
Group add_backend(const Group& group, const Group& bytes) {
  auto made = c10::make_intrusive<EmuBackend>(bytes->getBackend(c10::kCPU));
  group->setBackend(EMU, c10d::ProcessGroup::BackendType::CUSTOM, made);
  return group;
}

} // namespace
