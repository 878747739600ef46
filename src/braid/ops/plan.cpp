// Plans as text.
#include "braid/ops/plan.h"

#include <fmt/format.h>

#include <charconv>
#include <sstream>

#include "braid/core/check.h"

namespace braid {

std::string to_text(const Plan& plan) {
  std::string text = plan.num_chunks == 0   ? "fused"
                     : plan.num_chunks == 1 ? "serial"
                                            : fmt::format("chunked {}", plan.num_chunks);
  if (plan.ring) text += " ring";
  if (plan.native) text += " native";
  return text;
}

Plan plan_from_text(const std::string& text) {
  constexpr const char* kExpected =
      "', expected serial, fused or chunked N (2 or more), then ring (of fused) or native where "
      "wanted";
  std::istringstream words(text);
  Plan plan;
  std::string word;
  words >> word;
  if (word == "fused") {
    plan.num_chunks = 0;
  } else if (word == "chunked") {
    words >> word;
    const auto [end, error] =
        std::from_chars(word.data(), word.data() + word.size(), plan.num_chunks);
    BRAID_CHECK(error == std::errc{} && end == word.data() + word.size() && plan.num_chunks >= 2,
                "the plan '", text, kExpected);
  } else {
    BRAID_CHECK(word == "serial", "the plan '", text, kExpected);
  }
  while (words >> word) {
    bool& flag = word == "ring" ? plan.ring : plan.native;
    BRAID_CHECK((word == "ring" && plan.num_chunks == 0) || word == "native", "the plan '", text,
                kExpected);
    flag = true;
  }
  return plan;
}

}  // namespace braid
