// Texts travel as tensors of bytes, after their sizes.
#include "braid/comm/texts.h"

#include <algorithm>

#include "braid/comm/collectives.h"

namespace braid {
namespace {

at::Tensor bytes_of(const std::string& text) {
  at::Tensor bytes = at::empty({static_cast<std::int64_t>(text.size())}, at::kByte);
  std::copy(text.begin(), text.end(), bytes.mutable_data_ptr<std::uint8_t>());
  return bytes;
}

std::string text_of(const at::Tensor& bytes) {
  return {reinterpret_cast<const char*>(bytes.const_data_ptr<std::uint8_t>()),
          static_cast<std::size_t>(bytes.numel())};
}

}  // namespace

std::vector<std::string> gather_texts(const Group& group, const std::string& text) {
  const at::Tensor mine = bytes_of(text);
  const at::Tensor sizes = all_gather(group, at::scalar_tensor(mine.numel(), at::kLong).view({1}));
  const at::Tensor all = all_gather(group, mine);
  std::vector<std::string> texts;
  std::int64_t begin = 0;
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto size = sizes[rank].item<std::int64_t>();
    texts.push_back(text_of(all.narrow(0, begin, size)));
    begin += size;
  }
  return texts;
}

std::string broadcast_text(const Group& group, const std::string& text, int root) {
  const at::Tensor mine = bytes_of(text);
  const at::Tensor size =
      broadcast(group, at::scalar_tensor(mine.numel(), at::kLong).view({1}), root);
  const bool is_root = group.rank() == root;
  return text_of(
      broadcast(group, is_root ? mine : at::empty({size.item<std::int64_t>()}, at::kByte), root));
}

}  // namespace braid
