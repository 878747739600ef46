// The flag table on the command line: CLI11 options that write into a TrainConfig, and errors that
// name the flag.
#include <CLI/CLI.hpp>
#include <charconv>

#include "braid/core/check.h"
#include "braid/train/config.h"

namespace braid {
namespace {

const std::string kHidden;  // the group of options that the help does not show

void set_from_text(const ConfigFlag& flag, TrainConfig& config, const std::string& text) {
  std::visit(
      [&](auto field) {
        using T = std::decay_t<decltype(config.*field)>;
        if constexpr (std::is_same_v<T, std::int64_t> || std::is_same_v<T, double>) {
          config.*field = number_of<T>(flag.name, text, flag.range);
        } else if constexpr (std::is_same_v<T, std::string>) {
          const auto& choices = flag.choices;
          BRAID_CHECK(
              choices.empty() || std::find(choices.begin(), choices.end(), text) != choices.end(),
              "--", flag.name, " is '", text, "', expected one of ", value_text(flag));
          config.*field = text;
        }
      },
      flag.field);
}

void add_flag(CLI::App& app, TrainConfig& config, const ConfigFlag& flag, const std::string& group,
              bool needs_data) {
  std::string names = "--" + flag.name;
  for (const auto& alias : flag.aliases) names += ",--" + alias;
  CLI::Option* option = nullptr;
  if (const auto* field = std::get_if<bool TrainConfig::*>(&flag.field)) {
    option = app.add_flag(names, config.**field, flag.meaning);
  } else {
    option = app.add_option_function<std::string>(
        names, [&config, &flag](const std::string& text) { set_from_text(flag, config, text); },
        flag.meaning);
    option->type_name(value_text(flag));
    option->default_str(flag.bare            ? *flag.bare
                        : flag.unset.empty() ? text_of(flag, config)
                                             : flag.unset);
    if (flag.is_required(needs_data)) option->option_text(value_text(flag) + " (required)");
    if (flag.bare) option->expected(0, 1);
  }
  option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast)->group(group);
}

void refuse(const RefusedFlag& flag, const TrainConfig& config, const std::string& value) {
  if (flag.takes_value && value == flag.harmless) return;
  BRAID_CHECK(
      false, "--", flag.name, flag.takes_value ? " " : "", value, " is refused: ", flag.why,
      flag.excludes_coc && config.use_coc ? ", and it excludes --use-coc, which is on" : "");
}

// Insertions, deletions and replacements that turn a into b.
std::size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const auto replaced = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = std::exchange(row[j], std::min({row[j] + 1, row[j - 1] + 1, replaced}));
    }
  }
  return row[b.size()];
}

std::string closest_flag(const CLI::App& app, const std::string& unknown) {
  std::string closest;
  std::size_t least = std::max<std::size_t>(2, unknown.size() / 3) + 1;
  for (const auto* option : app.get_options()) {
    for (const auto& name : option->get_lnames()) {
      const bool contained = (unknown.size() > 3 && name.find(unknown) != std::string::npos) ||
                             (name.size() > 3 && unknown.starts_with(name + "-"));
      const auto distance = contained ? std::size_t{1} : edit_distance(unknown, name);
      if (distance < least) {
        least = distance;
        closest = name;
      }
    }
  }
  return closest;
}

/// "--save=" would take the next argument as its value.
void refuse_empty_values(const std::vector<std::string>& arguments) {
  for (const auto& text : arguments)
    BRAID_CHECK(!text.starts_with("--") || text.find('=') != text.size() - 1, text,
                " has no value after =");
}

}  // namespace

void explain_extras(const CLI::App& app) {
  const auto chosen = app.get_subcommands();
  if (app.remaining_size() == 0 && !chosen.empty()) explain_extras(*chosen.front());
  const auto extras = app.remaining();
  const auto flag = std::find_if(extras.begin(), extras.end(),
                                 [](const auto& text) { return text.starts_with("-"); });
  if (flag == extras.end())
    C10_THROW_ERROR(ValueError, "unexpected argument '" + extras.at(0) + "'");
  const auto name = flag->substr(0, flag->find('='));
  const auto closest =
      closest_flag(app, name.substr(std::min(name.find_first_not_of('-'), name.size())));
  C10_THROW_ERROR(
      ValueError,
      "unknown flag " + name + (closest.empty() ? "" : ". HINT: did you mean --" + closest + "?"));
}

template <class T>
T number_of(const std::string& name, const std::string& text, const Range& range) {
  T value{};
  const auto* last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, value);
  BRAID_CHECK(error == std::errc{} && end == last && range.contains(static_cast<double>(value)),
              "--", name, " is '", text, "', expected ",
              std::is_integral_v<T> ? "an integer " : "a number ", range.text());
  return value;
}
template std::int64_t number_of(const std::string&, const std::string&, const Range&);
template std::uint64_t number_of(const std::string&, const std::string&, const Range&);
template double number_of(const std::string&, const std::string&, const Range&);

void add_flags(CLI::App& app, TrainConfig& config, bool needs_data) {
  for (const auto& group : flag_table()) {
    const std::string& title = group.to_train && !needs_data ? kHidden : group.title;
    for (const auto& flag : group.flags) add_flag(app, config, flag, title, needs_data);
  }
  for (const auto& flag :
       refused_flags()) {  // after the table, so that their callbacks see what it set
    const auto callback = [&config, &flag](const std::string& value) {
      refuse(flag, config, value);
    };
    auto* option =
        flag.takes_value
            ? app.add_option_function<std::string>("--" + flag.name, callback)
            : app.add_flag_function("--" + flag.name, [callback](std::int64_t) { callback(""); });
    option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast)->group(kHidden);
  }
  app.add_flag("--help-markdown")->group(kHidden);
}

std::optional<std::string> parse(CLI::App& app, std::vector<std::string> arguments) {
  refuse_empty_values(arguments);
  std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants them
  try {
    app.parse(std::move(arguments));
  } catch (const CLI::CallForHelp&) {
    return app.help();
  } catch (const CLI::ExtrasError&) {
    explain_extras(app);
  } catch (const CLI::ParseError& error) {
    C10_THROW_ERROR(ValueError, error.what());
  }
  const auto* markdown = app.get_option_no_throw("--help-markdown");
  if (markdown != nullptr && markdown->count() > 0) return flags_markdown();
  return std::nullopt;
}

}  // namespace braid
