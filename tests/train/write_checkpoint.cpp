// Writes checkpoints of made-up weights for the Python tests: FOLDER f32|bf16 tied|untied [COUNT].
#include "tests/train/toy_model.h"

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  using namespace braid;  // NOLINT: a test program
  const at::ScalarType dtype = std::string(argv[2]) == "bf16" ? at::kBFloat16 : at::kFloat;
  const test::ToyShape shape{.tied = std::string(argv[3]) == "tied"};
  const int count = argc > 4 ? std::stoi(argv[4]) : 1;
  test::run_ranks(2, [&](const std::shared_ptr<Group>& tp) {
    test::ToyModel model(tp->rank(), 2, dtype, shape);
    model.fill();
    for (int i = 1; i <= count; ++i) test::save_toy(argv[1], *tp, model, 20 * i);
  });
}
