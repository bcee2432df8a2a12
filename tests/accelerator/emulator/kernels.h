// Any kernel: the CPU's, at once, on the same memory.
#pragma once

#include "generators.h"
#include "memory.h"

#include <ATen/SparseTensorImpl.h>
#include <torch/library.h>

#include <set>

namespace {

using at::IValue;

bool on_emu(const Tensor& t) { return t.defined() && t.device().type() == EMU; }

// torch itself wraps a storage's address in a tensor when it writes the storage to a file: such a tensor has no block.
c10::Storage cpu_storage(const c10::Storage& storage) {
  if (const Block* block = block_of(storage)) return block->cpu;
  c10::DataPtr data(storage.unsafeGetStorageImpl()->mutable_data(), c10::Device(c10::kCPU));
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), nullptr, false);
}

// The same bytes as a CPU tensor.
Tensor cpu_alias(const Tensor& t) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      cpu_storage(t.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (t.is_conj()) impl->_set_conj(true);
  if (t.is_neg()) impl->_set_neg(true);
  return made;
}

// With ``base``, a view of it: one of an ordinary tensor is an ordinary tensor, in inference mode too.
Tensor on_device(const c10::Storage& storage, const Tensor& like, const Tensor* base = nullptr) {
  const auto own = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  const auto bits = c10::DispatchKeySet({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  auto made = base == nullptr
      ? at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), own, like.dtype())
      : at::detail::make_tensor<c10::TensorImpl>(
            c10::TensorImpl::VIEW, c10::Storage(storage), base->key_set() - bits, like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) impl->_set_conj(true);
  if (like.is_neg()) impl->_set_neg(true);
  return made;
}

at::SparseTensorImpl* sparse_impl(const Tensor& t) { return static_cast<at::SparseTensorImpl*>(t.unsafeGetTensorImpl()); }

Tensor sparse_like(const Tensor& t, c10::DispatchKey key, const Tensor& indices, const Tensor& values) {
  auto made = at::detail::make_tensor<at::SparseTensorImpl>(c10::DispatchKeySet(key), t.dtype());
  sparse_impl(made)->resize_(sparse_impl(t)->sparse_dim(), sparse_impl(t)->dense_dim(), t.sizes());
  sparse_impl(made)->set_indices_and_values_unsafe(indices, values);
  sparse_impl(made)->set_coalesced(sparse_impl(t)->coalesced());
  return made;
}

bool named(const c10::FunctionSchema& schema, const std::set<std::string>& names) {
  return schema.name().rfind("aten::", 0) == 0 && names.count(schema.name().substr(6)) > 0;
}

// One call of an operator with arguments on the device.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), stack_(stack), first_(stack->size() - schema_.arguments().size()) {}

  void run() {
    find_device();
    c10::DeviceGuard guard(emu(device_));
    const auto key = current_key(device_);
    drain(key);
    take_arguments();
    run_on_cpu();
    sync_sizes();
    give_results();
    if (!is_view_ && !(reads_.empty() && writes_.empty()))
      log_kernel(key, c10::toString(op_.operator_name()), reads_, writes_);
    if (host_needs_result()) host_waits(key, c10::toString(op_.operator_name()));
  }

 private:
  template <typename Visit>
  void each_tensor(const IValue& value, Visit visit) {
    if (value.isTensor()) visit(value.toTensor());
    if (value.isTensorList())
      for (const Tensor& t : value.toTensorVector()) visit(t);
    if (value.isOptionalTensorList())
      for (const auto& t : value.toOptionalTensorVector())
        if (t) visit(*t);
  }

  // All tensors must be on one device, as CUDA's kernels want it. A CPU tensor is let through where CUDA does.
  void find_device() {
    static const std::set<std::string> take_cpu_tensors{
        "index", "index_put", "index_put_", "_index_put_impl_", "_pack_padded_sequence", "_ctc_loss",
        "_ctc_loss_backward", "_embedding_bag", "set_", "_foreach_copy_"};
    int found = -1;
    const Tensor* stranger = nullptr;
    for (size_t i = first_; i < stack_->size(); ++i) {
      const IValue& value = (*stack_)[i];
      each_tensor(value, [&](const Tensor& t) {
        if (!t.defined()) return;
        if (!on_emu(t)) {
          if (t.device().is_cpu() && t.dim() > 0 && t.numel() > 0) stranger = &t;
          return;
        }
        TORCH_CHECK(found < 0 || found == t.device().index(),
                    "Expected all tensors to be on the same device, but found emu:", found, " and ", t.device(),
                    ", in ", schema_.name());
        found = t.device().index();
      });
      if (value.isDevice() && value.toDevice().type() == EMU) {
        if (value.toDevice().has_index() && found < 0) found = value.toDevice().index();
      }
    }
    TORCH_CHECK(stranger == nullptr || found < 0 || named(schema_, take_cpu_tensors),
                "Expected all tensors to be on the same device, but found emu:", found, " and cpu, in ",
                schema_.name());
    device_ = found < 0 ? current_device : found;
  }

  Tensor to_cpu(const Tensor& t, bool written) {
    if (!on_emu(t)) return t;
    if (t.is_sparse()) {
      auto made = sparse_like(t, c10::DispatchKey::SparseCPU, to_cpu(sparse_impl(t)->indices(), written),
                              to_cpu(sparse_impl(t)->values(), written));
      sparse_ = true;
      taken_.push_back({t, made, written});
      return made;
    }
    (written ? writes_ : reads_) += span(block_of(t.storage()), t);
    // What is written and has no bytes yet may be an out= that the kernel resizes: not on the device's memory.
    const bool fresh = written && t.numel() == 0;
    auto made = fresh ? at::empty(t.sizes(), t.options().device(at::kCPU)) : cpu_alias(t);
    if (!fresh) twins_.emplace_back(made.storage().unsafeGetStorageImpl(), t.storage());
    taken_.push_back({t, made, written});
    return made;
  }

  void take_arguments() {
    Silence here;
    for (size_t i = 0; i < schema_.arguments().size(); ++i) {
      IValue& value = (*stack_)[first_ + i];
      const auto& argument = schema_.arguments()[i];
      const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite() &&
          !(argument.name() == "grads" && leaves_gradients());
      if (value.isTensor()) {
        value = to_cpu(value.toTensor(), written);
      } else if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& t : value.toTensorVector()) {
          list.push_back(to_cpu(t, written));
          // CUDA's kernel counts each write; there is nothing above it that would.
          if (written && schema_.name().rfind("aten::_foreach_", 0) == 0 && !t.is_inference())
            t.unsafeGetTensorImpl()->bump_version();
        }
        value = list;
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> list;
        for (const auto& t : value.toOptionalTensorVector()) {
          masks_ = masks_ || (t && on_emu(*t) && (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte));
          list.push_back(t ? std::optional<Tensor>(to_cpu(*t, written)) : std::nullopt);
        }
        value = list;
      } else if (value.isDevice() && value.toDevice().type() == EMU) {
        value = c10::Device(at::kCPU);
      } else if (value.isGenerator()) {
        value = cpu_generator(value.toGenerator());
        draws_ = true;
      } else if (value.isNone() && argument.type()->str().find("Generator") != std::string::npos) {
        value = cpu_generator(default_generator(device_));
        draws_ = true;
      }
    }
  }

  // A fused optimizer is said to write its gradients. It does so where it takes a loss scale off them.
  bool leaves_gradients() const {
    const auto scale = schema_.argumentIndexWithName("grad_scale");
    return schema_.name().rfind("aten::_fused_", 0) == 0 && scale && (*stack_)[first_ + *scale].isNone();
  }

  void run_on_cpu() {
    Silence here;
    std::optional<DrawsFromDevice> draws;
    if (!draws_ && op_.hasTag(at::Tag::nondeterministic_seeded)) draws.emplace(device_);
    c10::DispatchKeySet keys(c10::DispatchKey::CPU);
    if (sparse_ || makes_sparse()) keys = keys | c10::DispatchKeySet(c10::DispatchKey::SparseCPU);
    op_.redispatchBoxed(keys, stack_);
  }

  bool makes_sparse() const {
    return named(schema_, {"_sparse_coo_tensor_with_dims", "_sparse_coo_tensor_with_dims_and_tensors"});
  }

  // The kernel may have resized an out=, or given a sparse tensor other indices and values.
  void sync_sizes() {
    for (auto& [original, cpu, written] : taken_) {
      if (!written) continue;
      if (original.is_sparse()) {
        auto* from = sparse_impl(cpu);
        sparse_impl(original)->resize_(from->sparse_dim(), from->dense_dim(), cpu.sizes());
        sparse_impl(original)->set_indices_and_values_unsafe(from_cpu(from->indices()), from_cpu(from->values()));
        sparse_impl(original)->set_coalesced(from->coalesced());
      } else if (cpu.storage().data() != original.storage().data()) {
        if (cpu.sizes() == original.sizes() && cpu.numel() == 0) continue;
        original.resize_(cpu.sizes());
        original.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides());
        if (cpu.numel() == 0) continue;
        std::memcpy(cpu_alias(original).data_ptr(), cpu.data_ptr(), cpu.nbytes());
        writes_ += span(block_of(original.storage()), original);
      } else if (cpu.sizes() != original.sizes() || cpu.strides() != original.strides()) {
        original.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
      }
    }
  }

  Tensor from_cpu(const Tensor& result) {
    if (!result.defined() || !result.device().is_cpu()) return result;
    if (result.is_sparse())
      return sparse_like(result, c10::DispatchKey::SparsePrivateUse1, from_cpu(sparse_impl(result)->indices()),
                         from_cpu(sparse_impl(result)->values()));
    auto* found = result.storage().unsafeGetStorageImpl();
    for (auto& [original, cpu, written] : taken_)
      if (!cpu.is_sparse() && cpu.storage().unsafeGetStorageImpl() == found)
        return on_device(original.storage(), result, &original);
    for (auto& [cpu, storage] : twins_)
      if (cpu == found) return on_device(storage, result); // of the same memory as another result
    c10::Storage storage(c10::Storage::use_byte_size_t(), result.storage().nbytes(),
                         adopt(result.storage(), device_), &emu_allocator, /*resizable=*/true);
    twins_.emplace_back(found, storage);
    auto made = on_device(storage, result);
    writes_ += span(block_of(storage), made);
    return made;
  }

  Tensor give(const Tensor& result) {
    for (auto& [original, cpu, written] : taken_)
      if (cpu.is_same(result)) return original;
    return from_cpu(result);
  }

  void give_results() {
    const auto& returns = schema_.returns();
    const auto first = stack_->size() - returns.size();
    for (size_t i = 0; i < returns.size(); ++i) {
      IValue& value = (*stack_)[first + i];
      const auto* alias = returns[i].alias_info();
      is_view_ = is_view_ || (alias != nullptr && !alias->isWrite());
      if (value.isTensor()) {
        value = give(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& t : value.toTensorVector()) list.push_back(give(t));
        value = list;
      }
    }
  }

  // Where a CUDA kernel has the host wait: a number for the host, or a size that depends on the values.
  bool host_needs_result() const {
    static const std::set<std::string> names{"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2",
                                             "unique_dim", "unique_consecutive", "_coalesce", "bincount",
                                             "repeat_interleave"};
    return named(schema_, names) || (masks_ && named(schema_, {"index", "index_put", "index_put_", "_index_put_impl_"}));
  }

  struct Taken {
    Tensor original;
    Tensor cpu;
    bool written;
  };
  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  const size_t first_;
  int device_ = 0;
  bool draws_ = false, sparse_ = false, masks_ = false, is_view_ = false;
  std::string reads_, writes_;
  std::vector<Taken> taken_;
  std::vector<std::pair<c10::StorageImpl*, c10::Storage>> twins_; // CPU storages, and the device's for the same bytes
};

void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) { Call(op, stack).run(); }

torch::CppFunction fallback() { return torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>(); }

// A composite kernel wins over a fallback, and rounds in another way than the CPU's own kernel for the operator. So
// each operator that has both gets the fallback as its kernel. The foreach operators, too: on CUDA they are one kernel.
void prefer_kernels_of(c10::DispatchKey cpu, torch::Library& m, const std::set<std::string>& except) {
  using c10::DispatchKey;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0 || except.count(name.name.substr(6))) continue;
    const auto op = dispatcher.findOp(name);
    if (!op) continue;
    const bool composite = op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
        op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional) ||
        op->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
    const bool foreach = cpu == DispatchKey::CPU && name.name.rfind("aten::_foreach_", 0) == 0 &&
        op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd);
    if (foreach || (composite && op->hasKernelForDispatchKey(cpu))) m.impl(c10::toString(name).c_str(), fallback());
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(fallback()); }
TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) { m.fallback(fallback()); }

} // namespace
