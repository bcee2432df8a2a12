// Random numbers: each device has a generator of its own, which draws what a CPU generator of the same seed draws.
#pragma once

#include "streams.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <torch/version.h>

namespace {

struct EmuGenerator final : c10::GeneratorImpl {
  explicit EmuGenerator(int device, at::Generator cpu = at::detail::createCPUGenerator())
      : GeneratorImpl(emu(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), cpu(std::move(cpu)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return const_cast<at::Generator&>(cpu).seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  EmuGenerator* clone_impl() const override { return new EmuGenerator(device_.index(), cpu.clone()); }
  at::Generator cpu;
};

const at::Generator& default_generator(int device) {
  static const std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < DEVICES; ++i) made.push_back(at::make_generator<EmuGenerator>(i));
    return made;
  }();
  return all.at(device < 0 ? current_device : device);
}

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 8 // newer ones ask the hooks
at::Generator new_generator(c10::DeviceIndex device) { return at::make_generator<EmuGenerator>(device); }
REGISTER_GENERATOR_PRIVATEUSE1(new_generator)
#endif

at::Generator cpu_generator(const at::Generator& generator) {
  return generator.device().type() == EMU ? static_cast<EmuGenerator*>(generator.unsafeGetGeneratorImpl())->cpu
                                          : generator;
}

// While an operator without a generator argument draws: the CPU's default generator is in the state of the device's.
struct DrawsFromDevice {
  explicit DrawsFromDevice(int device) : mine(of(cpu_generator(default_generator(device)))), before(shared().clone()) {
    copy(mine, shared());
  }
  ~DrawsFromDevice() {
    copy(shared(), mine);
    copy(*before, shared());
  }
  static at::CPUGeneratorImpl& of(const at::Generator& g) {
    return *static_cast<at::CPUGeneratorImpl*>(g.unsafeGetGeneratorImpl());
  }
  static at::CPUGeneratorImpl& shared() { return of(at::detail::getDefaultCPUGenerator()); }
  static void copy(at::CPUGeneratorImpl& from, at::CPUGeneratorImpl& to) {
    to.set_engine(from.engine());
    to.set_next_float_normal_sample(from.next_float_normal_sample());
    to.set_next_double_normal_sample(from.next_double_normal_sample());
  }
  at::CPUGeneratorImpl& mine;
  std::shared_ptr<at::CPUGeneratorImpl> before;
};

} // namespace
