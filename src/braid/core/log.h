// Lines for the person who started the program, on stderr.
#pragma once

#include <cstdio>
#include <string>

namespace braid {

/// Whether this process speaks: set false on all ranks but the first, so that a line comes once.
inline bool speaks = true;

inline void warn(const std::string& text) {
  if (speaks) std::fprintf(stderr, "braid: warning: %s\n", text.c_str());
}

/// An error that ends the program, in one line. Where stderr can't be written nothing can be said.
inline void say_error(const std::string& text) {
  std::fprintf(stderr, "braid: error: %s\n", text.c_str());
}

}  // namespace braid
