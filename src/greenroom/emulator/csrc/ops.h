#pragma once

namespace emu {

int register_fallbacks(); // -> the number of operators that run on CPU kernels

} // namespace emu
