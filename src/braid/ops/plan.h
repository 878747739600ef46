// How one operation runs, as the tuner chooses it and a person can write it: "fused", "fused ring native", "chunked 4".
#pragma once

#include <string>

namespace braid {

struct Plan {
  int num_chunks = 1;   // 0: fused, 1: serial, else so many chunks
  bool ring = false;    // of a fused reduction: partials go round instead of straight to the owner
  bool native = false;  // half types are multiplied in their own type, not through f32

  friend bool operator==(const Plan&, const Plan&) = default;
};

std::string to_text(const Plan& plan);
/// Errors: ValueError naming the text when it is not a plan.
Plan plan_from_text(const std::string& text);

}  // namespace braid
