#!/usr/bin/env bash
# Everything that takes a GPU, with which no CI machine comes: kernel and step tests, golden losses beside PyTorch, speed
# beside PyTorch. Needs python3 with torch, numpy and xxhash; with two GPUs the rows of two GPUs run as well.
#   tools/check_gpu.sh [BIN] [OUT]   BIN: folder of muster and the *_gpu_test programs (build/bin is made of build/ by
#                                    default); OUT: folder for logs and results.jsonl (default /tmp/muster-gpu)
#   STAGES="tests golden speed elastic sanitize"   what to run, in this order (default: all but sanitize)
set -uo pipefail
cd "$(dirname "$0")/.."
bin=${1:-}
out=${2:-/tmp/muster-gpu}
stages=${STAGES:-tests golden speed elastic}
mkdir -p "$out"
if [[ -z $bin ]]; then
  bin=$out/bin
  mkdir -p "$bin"
  find build -type f -perm -u+x \( -name muster -o -name '*_gpu_test' \) -exec ln -sf "$PWD/{}" "$bin/" \;
fi
gpus=$(nvidia-smi --query-gpu=index --format=csv,noheader | wc -l)
started=$SECONDS
failed=0
export PYTHONUNBUFFERED=1
# step NAME COMMAND...: one line when it has ended; its output in OUT/NAME.log.
step() {
  local name=$1
  shift
  "$@" > "$out/$name.log" 2>&1
  local status=$?
  echo "[$((SECONDS - started)) s] $name: $([[ $status == 0 ]] && echo passed || echo "FAILED ($status), see $out/$name.log")"
  [[ $status == 0 ]] || failed=1
}

if [[ $stages == *tests* ]]; then
  for program in "$bin"/*_gpu_test; do
    step "$(basename "$program")" timeout 300 "$program"
  done
fi
if [[ $stages == *golden* ]]; then
  step golden timeout 300 python3 tests/golden/gpu_golden.py --muster "$bin/muster" --folder "$out" --verbose \
    gpt2-124m llama-3.2-1b
  step cpu_and_gpu timeout 120 python3 tests/golden/gpu_agreement.py --muster "$bin/muster" cpu
  [[ $gpus -lt 2 ]] ||
    step one_and_two_gpus timeout 200 python3 tests/golden/gpu_agreement.py --muster "$bin/muster" gpus
  tail -n 4 "$out/golden.log"
fi
if [[ $stages == *speed* ]]; then
  works=(llama-3.2-1b gpt2-124m llama-3.2-1b-fp8)
  [[ $gpus -lt 2 ]] || works+=(llama-3.2-1b-2gpus llama-3-8b-2gpus)
  step speed python3 tools/compare_pytorch.py --muster "$bin/muster" --out "$out/results.jsonl" "${works[@]}"
  python3 tools/compare_pytorch.py --table --out "$out/results.jsonl"
fi
if [[ $stages == *elastic* && $gpus -ge 2 ]]; then
  step elastic timeout 300 python3 tools/check_elastic_gpu.py --muster "$bin/muster"
  tail -n 8 "$out/elastic.log"
fi
if [[ $stages == *sanitize* ]]; then
  # cuBLASLt's own kernels are reported by racecheck, so its users are left out there.
  step memcheck compute-sanitizer --tool memcheck --error-exitcode 9 "$bin/muster_kernels_gpu_test"
  step racecheck compute-sanitizer --tool racecheck --error-exitcode 9 "$bin/muster_kernels_gpu_test" \
    --gtest_filter=-*Matmul*:*Linear*:*CrossEntropy*:*Fp8*
fi
exit $failed
