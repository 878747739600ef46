// Writes a checkpoint of made-up weights for transformers_test.py: FOLDER f32|bf16 tied|untied.
#include "tests/train/toy_model.h"

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  using namespace braid;  // NOLINT: a test program
  const at::ScalarType dtype = std::string(argv[2]) == "bf16" ? at::kBFloat16 : at::kFloat;
  const test::ToyShape shape{.tied = std::string(argv[3]) == "tied"};
  test::run_ranks(2, [&](const std::shared_ptr<Group>& tp) {
    test::ToyModel model(tp->rank(), 2, dtype, shape);
    model.fill();
    test::save_toy(argv[1], *tp, model, 20);
  });
}
