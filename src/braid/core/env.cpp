// Reads the BRAID_* environment variables.
#include "braid/core/env.h"

#include <charconv>
#include <cstdlib>
#include <cstring>

#include "braid/core/check.h"

namespace braid {
namespace {

template <class T>
T number(const char* name, T fallback, T least) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return fallback;
  T value{};
  const auto [end, error] = std::from_chars(text, text + std::strlen(text), value);
  BRAID_CHECK(error == std::errc{} && *end == '\0' && value >= least, name, " is '", text,
              "', expected a number of at least ", least);
  return value;
}

Env read() {
  Env e;
  const double timeout_s = number<double>("BRAID_TIMEOUT_S", 60, 0.001);
  BRAID_CHECK(timeout_s <= 1e6, "BRAID_TIMEOUT_S is ", timeout_s, ", expected at most 1e6");
  e.timeout = std::chrono::milliseconds(static_cast<int64_t>(1000 * timeout_s));
  e.shared_memory = number<int>("BRAID_SHARED_MEMORY", 1, 0) != 0;
  e.slot_bytes = number<std::size_t>("BRAID_SLOT_BYTES", e.slot_bytes, 4096) / 4096 * 4096;
  BRAID_CHECK(e.slot_bytes <= std::size_t{1} << 40, "BRAID_SLOT_BYTES is ", e.slot_bytes,
              ", expected at most 2^40");
  e.spin = number<int>("BRAID_SPIN", e.spin, 0);
  if (const char* text = std::getenv("BRAID_INTERFACE")) e.interface = text;
  return e;
}

}  // namespace

const Env& env() {
  static const Env value = read();
  return value;
}

}  // namespace braid
