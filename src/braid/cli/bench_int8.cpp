// braid bench int8: the product with an int8 weight beside ATen's own in each type, on one core.
#include <ATen/Parallel.h>

#include <nlohmann/json.hpp>

#include "braid/cli/bench.h"
#include "braid/cli/output.h"
#include "braid/ops/int8_weight.h"

namespace braid::cli {

void bench_int8(std::int64_t n, std::int64_t k, int rounds, bool json) {
  at::set_num_threads(1);
  const at::Tensor weight = at::randn({n, k});
  const Int8Weight channels = quantize_weight(weight);
  const Int8Weight groups =
      quantize_weight(weight, {.granularity = Granularity::group, .group_size = 128});
  const std::vector<at::ScalarType> dtypes{at::kBFloat16, at::kHalf, at::kFloat};
  std::vector<at::Tensor> weights;
  for (const auto dtype : dtypes) weights.push_back(weight.to(dtype));
  const auto alone = Group::create_stub("one", 0, 1);
  if (!json)
    print(
        "n {} k {}, ms; best: the fastest of ATen's half types\n{:>5} {:>10} {:>10} {:>8} {:>8} "
        "{:>8} {:>13}\n",
        n, k, "m", "channel", "group 128", "mm bf16", "mm fp16", "mm f32", "best / int8");
  for (const std::int64_t m : {1, 4, 16, 64, 256}) {
    std::vector<Candidate> candidates;
    std::vector<at::Tensor> inputs, outputs;
    for (const auto dtype : dtypes) {
      inputs.push_back(at::randn({m, k}).to(dtype));
      outputs.push_back(at::empty({m, n}, dtype));
    }
    candidates.push_back({"channel", [&] { channels.multiply(inputs[0], outputs[0], false); }});
    candidates.push_back({"group 128", [&] { groups.multiply(inputs[0], outputs[0], false); }});
    for (std::size_t i = 0; i < dtypes.size(); ++i)
      candidates.push_back({"mm", [&, i] { at::mm_out(outputs[i], inputs[i], weights[i].t()); }});
    const auto s = time_interleaved(*alone, candidates, rounds);
    const double best = std::min(s[2], s[3]);
    if (json)
      print("{}\n", nlohmann::json{{"m", m},
                                   {"n", n},
                                   {"k", k},
                                   {"int8_channel_s", s[0]},
                                   {"int8_group_128_s", s[1]},
                                   {"mm_bf16_s", s[2]},
                                   {"mm_fp16_s", s[3]},
                                   {"mm_f32_s", s[4]}}
                        .dump());
    else
      print("{:>5} {:>10.3f} {:>10.3f} {:>8.3f} {:>8.3f} {:>8.3f} {:>6.2f} {:>6.2f}\n", m,
            1e3 * s[0], 1e3 * s[1], 1e3 * s[2], 1e3 * s[3], 1e3 * s[4], best / s[0], best / s[1]);
  }
}

}  // namespace braid::cli
