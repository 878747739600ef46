# Finds libtorch in PyTorch's CPU wheel (the private virtual environment, or the Python given by BRAID_PYTHON).
set(BRAID_PYTHON "${PROJECT_SOURCE_DIR}/.venv/bin/python" CACHE FILEPATH "Python that has torch installed")
if(NOT DEFINED CACHE{BRAID_TORCH_DIR} OR NOT EXISTS "${BRAID_TORCH_DIR}")
  execute_process(
    COMMAND ${BRAID_PYTHON} -c
            "import importlib.util; print(importlib.util.find_spec('torch').submodule_search_locations[0])"
    OUTPUT_VARIABLE torch_dir OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE torch_missing)
  if(torch_missing)
    message(FATAL_ERROR "no torch in ${BRAID_PYTHON}. HINT: run `make setup`, or pass -DBRAID_PYTHON=...")
  endif()
  set(BRAID_TORCH_DIR "${torch_dir}" CACHE PATH "The torch package that holds include/ and lib/")
endif()

# The wheel's own TorchConfig.cmake takes seconds, and asks for MKL and CUDA toolkits that the CPU build does not need.
add_library(torch_cpu_only INTERFACE)
target_include_directories(torch_cpu_only SYSTEM INTERFACE
  "${BRAID_TORCH_DIR}/include" "${BRAID_TORCH_DIR}/include/torch/csrc/api/include")
target_compile_definitions(torch_cpu_only INTERFACE USE_DISTRIBUTED USE_C10D USE_C10D_GLOO)
target_link_libraries(torch_cpu_only INTERFACE
  "${BRAID_TORCH_DIR}/lib/libtorch.so" "${BRAID_TORCH_DIR}/lib/libtorch_cpu.so" "${BRAID_TORCH_DIR}/lib/libc10.so")
target_link_options(torch_cpu_only INTERFACE "-Wl,-rpath,${BRAID_TORCH_DIR}/lib" "-Wl,--no-as-needed")
