// What the host does with pinned memory: any CPU operator on it is a line of the log.
#pragma once

#include "memory.h"

#include <ATen/record_function.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>

#include <set>

namespace {

void log_host_access(const std::string& name, const std::string& reads, const std::string& writes) {
  if (!reads.empty() || !writes.empty()) log_line("host_access\t" + name + "\t" + reads + "\t" + writes);
}

std::unique_ptr<at::ObserverContext> see_host_access(const at::RecordFunction& fn) {
  // They read no values, or call an operator that does, or are copies between devices, which write their own line.
  static const std::set<std::string> others{
      "aten::is_pinned", "aten::empty_like", "aten::zeros_like", "aten::ones_like", "aten::full_like",
      "aten::rand_like", "aten::randn_like", "aten::new_empty", "aten::new_empty_strided", "aten::new_zeros",
      "aten::new_ones", "aten::new_full", "aten::to", "aten::_to_copy", "aten::_copy_from", "aten::set_",
      "aten::resize_", "aten::is_same_size", "aten::is_nonzero", "aten::item", "aten::_has_compatible_shallow_copy_type",
      "emu::host_reads"};
  if (silent || !logging) return nullptr;
  const auto schema = fn.operator_schema();
  if (!schema || others.count(schema->name())) return nullptr;
  for (const auto& r : schema->returns())
    if (r.alias_info() && !r.alias_info()->isWrite()) return nullptr; // a view
  const auto inputs = fn.inputs();
  std::string reads, writes;
  bool device = false;
  for (size_t i = 0; i < inputs.size() && i < schema->arguments().size(); ++i) {
    const auto* alias = schema->arguments()[i].alias_info();
    auto look = [&](const Tensor& t) {
      device = device || (t.defined() && t.device().type() == EMU);
      if (alias == nullptr || alias->isWrite()) (alias ? writes : reads) += span(pinned_block_of(t), t);
    };
    if (inputs[i].isTensor()) look(inputs[i].toTensor());
    if (inputs[i].isTensorList())
      for (const Tensor& t : inputs[i].toTensorVector()) look(t);
  }
  if (device && schema->name() == "aten::copy_") return nullptr;
  log_host_access(c10::toString({schema->name(), schema->overload_name()}), reads, writes);
  return nullptr;
}

// To see every operator is slow: only while there is pinned memory.
void pinned_memory_came_or_went(bool any) {
  static std::mutex mutex;
  static const auto handle = at::addGlobalCallback(
      at::RecordFunctionCallback(&see_host_access).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  static bool enabled = true;
  std::lock_guard<std::mutex> guard(mutex);
  if (any == enabled) return;
  enabled = any;
  any ? at::reenableCallback(handle) : at::disableCallback(handle);
}

// Python reads a CPU tensor in a way that the dispatcher does not see.
void host_reads(const Tensor& t, const std::string& name) { log_host_access(name, span(pinned_block_of(t), t), ""); }

} // namespace
