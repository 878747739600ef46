// Which braid this is, to be compared between processes.
#pragma once

#include <string>

namespace braid {

/// The version, and the build of the program or library that holds braid: its ELF build-id.
std::string build_text();

}  // namespace braid
