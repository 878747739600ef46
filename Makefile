# The front door: what a person or CI does with braid. `make help` lists it.
.DEFAULT_GOAL := help
.PHONY: help setup build train test test-tsan test-asan test-fuzz test-faults bench lint clean
jobs := $(shell nproc)
build = cmake --build $(1) -j $(jobs)
# CMake configures once; later changes of its files are seen by the build itself.
configure = test -e $(1)/build.ninja || cmake --preset $(2)

help:  ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup:  ## install what the build needs: Debian packages, and PyTorch in .venv
	@tools/setup.sh

build: setup  ## the program build/braid
	@$(call configure,build,release)
	@$(call build,build) --target braid_cli

train: build  ## train a small decoder on two processes, into runs/demo
	@tools/demo.sh

test:  ## build and run all tests
	@tools/setup.sh test
	@$(call configure,build,release)
	@$(call build,build)
	@ctest --test-dir build --output-on-failure $(CTEST_FLAGS)

test-tsan: setup  ## the tests of core, comm and ops under ThreadSanitizer
	@$(call configure,build-tsan,tsan)
	@$(call build,build-tsan)
	@ctest --test-dir build-tsan --output-on-failure -L 'unit|ranks'

test-fuzz: setup  ## 10,000 random sequences of operations under ThreadSanitizer: half an hour
	@$(call configure,build-tsan,tsan)
	@$(call build,build-tsan) --target braid_test_ops_ranks
	@BRAID_FUZZ_SEQUENCES=10000 TSAN_OPTIONS=suppressions=tests/support/tsan.supp BRAID_SLOT_BYTES=268435456 \
	  build-tsan/braid_test_ops_ranks --gtest_filter='FuzzSequences*'

test-asan: setup  ## the tests of core, comm and ops under AddressSanitizer
	@$(call configure,build-asan,asan)
	@$(call build,build-asan)
	@ctest --test-dir build-asan --output-on-failure

test-faults: build  ## ranks on several hosts killed, frozen and cut off, 50 times each way: an hour
	@$(call build,build) --target braid_test_operation
	@.venv/bin/python tests/hosts/faults_test.py build/braid build/braid_test_operation 50

bench: build  ## the standing measurements, into bench/results
	@tools/setup.sh test
	@bench/run.sh

lint: setup  ## format the sources and check the habits
	@tools/lint.sh

clean:  ## remove what was built (.venv and runs stay)
	rm -rf build build-*/
