#pragma once

namespace emu {

void register_backend(); // hooks and the CPU allocator hook; the rest registers itself when the library loads

} // namespace emu
