#pragma once

namespace emu {

void register_meta_guards();

} // namespace emu
