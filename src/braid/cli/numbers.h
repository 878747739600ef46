// Flags with a number that the trainer's table does not have, with errors of the same texts.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>

#include "braid/train/config.h"

namespace braid::cli {

constexpr Range kCount{1, 2147483648};

/// Adds --name to `app`, for a number or an optional one. A number that is within the range is shown as the
/// default. `target` must outlive `app`. Errors: of parsing, as number_of().
template <class Target>
CLI::Option* add_number(CLI::App& app, const std::string& name, Target& target, const Range& range,
                        const std::string& meaning) {
  constexpr bool kIsOptional = !std::is_arithmetic_v<Target>;
  using T = typename std::conditional_t<kIsOptional, Target, std::optional<Target>>::value_type;
  using Parsed =
      std::conditional_t<std::is_floating_point_v<T>, double,
                         std::conditional_t<std::is_unsigned_v<T>, std::uint64_t, std::int64_t>>;
  auto* option = app.add_option_function<std::string>(
      "--" + name,
      [&target, name, range](const std::string& text) {
        target = static_cast<T>(number_of<Parsed>(name, text, range));
      },
      meaning);
  option->type_name(std::is_floating_point_v<T> ? "X" : "N");
  if constexpr (!kIsOptional)
    if (range.contains(static_cast<double>(target))) option->default_str(fmt::format("{}", target));
  return option;
}

}  // namespace braid::cli
