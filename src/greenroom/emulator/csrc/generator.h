// Random numbers: each device has its own state, drawn from by the CPU's generator algorithm, so that a seed
// gives the CPU's numbers.
#pragma once
#include <ATen/core/Generator.h>

namespace emu {

const at::Generator& default_generator(int device);
at::Generator new_generator(int device);
at::Generator cpu_generator(const at::Generator& emu_generator); // what the CPU kernels are handed

} // namespace emu
