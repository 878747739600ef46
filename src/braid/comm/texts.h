// Texts between the ranks of a group.
#pragma once

#include <string>
#include <vector>

#include "braid/comm/group.h"

namespace braid {

/// The texts of all ranks, by rank. Collective; errors as all_gather's.
std::vector<std::string> gather_texts(const Group& group, const std::string& text);

/// The text of rank `root`, on every rank. Collective; errors as broadcast's.
std::string broadcast_text(const Group& group, const std::string& text, int root);

}  // namespace braid
