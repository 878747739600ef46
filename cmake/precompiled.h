// What nearly every source includes, compiled once.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>
