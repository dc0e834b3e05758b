// An operation that mixes emu and meta tensors must raise, as on any device.
//
// Meta outranks every backend in dispatch, so such a call never reaches the emulator: torch runs the meta kernel,
// which only derives shapes and, for several operators (mm, addmm, convolution, ...), returns a fresh emu tensor
// with undefined bytes. A placeholder that was read by mistake would pass. So the meta kernels get a guard.
#include "meta_guard.h"

#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace emu {

namespace {

using c10::DispatchKey;

auto& originals = *new std::unordered_map<const c10::FunctionSchema*, c10::SafeKernelFunction>();

void guard(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  std::optional<c10::Device> emu, meta;
  auto see = [&](const at::Tensor& t) {
    if (!t.defined()) return;
    if (t.is_meta()) meta = t.device();
    else if (t.device().type() == c10::DeviceType::PrivateUse1) emu = t.device();
  };
  for (const auto& v : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (v.isTensor()) see(v.toTensor());
    else if (v.isTensorList())
      for (const at::Tensor& t : v.toTensorList()) see(t);
    else if (v.isOptionalTensorList())
      for (const std::optional<at::Tensor>& t : v.toOptionalTensorList())
        if (t) see(*t);
  }
  TORCH_CHECK(!(emu && meta), "Expected all tensors to be on the same device, but found at least two devices, ", *emu,
              " and meta! (when running ", op.schema().name(), ")");
  originals.at(&op.schema()).callBoxed(op, keys, stack);
}

int tensor_arguments(const c10::FunctionSchema& schema) { // a list counts as two
  int n = 0;
  for (const auto& a : schema.arguments()) {
    auto type = a.type()->str();
    auto has = [&](const char* part) { return type.find(part) != std::string::npos; };
    if (has("Tensor")) n += has("List") || has("[]") ? 2 : 1;
  }
  return n;
}

} // namespace

void register_meta_guards() {
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::Meta, __FILE__, __LINE__);
  const std::unordered_set<std::string> may_mix = {"aten::copy_", "aten::is_same_size", "aten::_has_compatible_shallow_copy_type",
                                                   "aten::set_data", "aten::_copy_from", "aten::_copy_from_and_resize"};
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0 || may_mix.count(name.name)) continue;
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || !op->hasKernelForDispatchKey(DispatchKey::Meta) || tensor_arguments(op->schema()) < 2) continue;
    originals.emplace(&op->schema(), op->getComputedKernelForDispatchKey(DispatchKey::Meta));
    auto full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&guard>());
  }
}

} // namespace emu
