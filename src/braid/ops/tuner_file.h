// The file of the tuner's choices (--tuner-file): read by a run, added to by several at once, edited by a person.
//
//   {"choices": {
//     "matmul_reduce_scatter m=1024 n=512 k=1344 f32 ranks=2 host": "fused",
//     "all_gather_matmul m=1024 n=* k=* * * host": "chunked 4"},
//    "cpu": "..."}
//
// Keys and pins: NOTE [table] in ops/tuner.h. What was measured on another CPU is not used; pins are.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "braid/comm/group.h"

namespace braid::tuner {

/// Sets the choices of the file, as rank 0 sees it, as set_choices() does; none if there is no file. Of another
/// CPU's file, with a warning, only the pins.
///   Order   collective
///   Errors  ValueError naming the file and the key, the same on all ranks: it does not parse, a plan is none, a key
///           could not be any operation's
void read_choices(const Group& group, const std::string& path);

/// Adds what was measured to the file, before older choices of the same keys; what
/// others have written meanwhile, and every pin, stays. A file that is there is left alone where nothing was measured.
///   Errors  ValueError as read_choices, the file is left as it is; c10::Error naming the path
void write_choices(const std::string& path, const nlohmann::json& measured);

/// Warns, in one line, of pins that nothing was run by: at the end of a run that used the file.
void warn_of_unused_pins(const std::string& path);

}  // namespace braid::tuner
