// A text for models to learn from.
#pragma once

#include <cstdint>
#include <string>

namespace braid::test {

/// Words in a made-up order, the same every time; at least `bytes` of them.
inline std::string words(std::size_t bytes) {
  const char* const kWords[] = {"braid ", "gather ", "matmul ", "scatter ", "rank ",  "tile ",
                                "one ",   "weaves ", "the\n",   "while ",   "hides ", "sum "};
  std::string text;
  for (std::uint32_t state = 1; text.size() < bytes;) {
    state = state * 1664525U + 1013904223U;
    text += kWords[(state >> 24) % 12];
  }
  return text;
}

}  // namespace braid::test
