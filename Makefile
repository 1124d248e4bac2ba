# The commands of this repository. Each sets up what it needs; nothing is installed outside .tools
# and target.

export PATH := $(CURDIR)/.tools/bin:$(PATH)

.PHONY: help setup demo test bench clean

help:
	@echo "make demo    classify the shipped handwritten digits"
	@echo "make test    run every test"
	@echo "make bench   measure throughput beside the limit of the bare stages"
	@echo "make setup   fetch the native parts into .tools"

setup:
	@scripts/setup.sh

demo: setup
	@scripts/demo.sh

test: setup
	cargo build --workspace --all-targets
	cargo test --workspace
	@scripts/check-deploy.sh

bench: setup
	@scripts/bench.sh

clean:
	cargo clean
	rm -rf .tools
