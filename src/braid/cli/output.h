// Standard output: written at once and checked, so that what nobody could read is no success.
#pragma once

#include <fmt/format.h>

#include <string>
#include <utility>

namespace braid::cli {

/// Writes to standard output at once.
///   Gives   false where nobody reads it any more; only where SIGPIPE is ignored: else that ends the program
///   Errors  c10::Error with the system's reason: a full disk, a closed file
bool write_output(const std::string& text);

/// The same of a formatted text; that nobody reads it is an error, too.
void print_text(const std::string& text);
template <class... Parts>
void print(fmt::format_string<Parts...> text, Parts&&... parts) {
  print_text(fmt::format(text, std::forward<Parts>(parts)...));
}

/// Where standard input, output or error is closed, opens what fails in its place, so that no file or socket
/// takes its number. To be called before anything is opened.
void occupy_standard_streams();

}  // namespace braid::cli
