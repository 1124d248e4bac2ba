# The commands of this repository. Each sets up what it needs; nothing is installed outside .tools
# and target.

export PATH := $(CURDIR)/.tools/bin:$(PATH)

.PHONY: help setup demo test chaos bench dist check-dist clean

help:
	@echo "make demo    classify the shipped handwritten digits"
	@echo "make test    run every test"
	@echo "make chaos   inject faults into a fleet: SEED=7 MINUTES=30"
	@echo "make bench   compare throughput with the limit of the bare stages"
	@echo "make dist    a Python wheel, a tarball and a Debian package, in target/package"
	@echo "make setup   fetch the native parts into .tools"

setup:
	@scripts/setup.sh

demo:
	@scripts/setup.sh build
	@scripts/demo.sh

test: setup
	cargo build --workspace --all-targets
	cargo test --workspace --no-fail-fast
	@scripts/check-deploy.sh

chaos: setup
	@scripts/chaos.sh "$(SEED)" "$(MINUTES)"

bench: setup
	@scripts/bench.sh

dist:
	@scripts/setup.sh build
	@scripts/dist.sh

# The packages of the binary that `make test` has built, tried as on a user's machine.
check-dist: setup
	@PROFILE=dev scripts/dist.sh
	@scripts/check-dist.sh

clean:
	cargo clean
	rm -rf .tools
