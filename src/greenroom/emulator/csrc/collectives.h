#pragma once
#include <torch/csrc/utils/pybind.h>

namespace emu {

void bind_collectives(pybind11::module& m);

} // namespace emu
