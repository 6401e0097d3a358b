# SPDX-License-Identifier: MIT
# shellcheck shell=bash
# PyTorch, transformers and kvpress at pinned versions, and the extension of examples/torch. To be sourced behind setup.sh.

torch=${KVMELD_TORCH:-$root/build/torch} # kept from run to run: some 5 GB, of which NVIDIA's libraries are 4
export KVMELD_TORCH_LIBRARY=$torch/extension/libkvmeld_torch.so
export PYTHONPATH=$root/examples/torch${PYTHONPATH:+:$PYTHONPATH}
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} # threads that spin take a busy machine's cores from one another
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} TRANSFORMERS_VERBOSITY=${TRANSFORMERS_VERBOSITY:-error}

# fetch_torch [PACKAGE...]: the virtual environment, with all of the requirements or these of them; nothing to do where
# all are there already.
fetch_torch() {
  local log=$torch/log requirements=$root/examples/torch/requirements.txt wanted=(-r)
  mkdir -p "$torch"
  cmp -s "$requirements" "$torch/stamp" && return 0
  echo "fetching: PyTorch and transformers (2.9 GB, on the disk 5.2 GB, once; five minutes at 100 Mbit/s)"
  if (($#)); then wanted=("$@" -c); fi
  : >"$log"
  {
    { [[ -x $torch/venv/bin/pip ]] || python3 -m venv "$torch/venv"; } &&
      "$torch/venv/bin/pip" install --disable-pip-version-check "${wanted[@]}" "$requirements"
  } 2>&1 | count_fetched 2900 | follow_ninja "$log" "fetching, in MB" || fail "$log" "PyTorch could not be installed:"
  (($#)) || cp "$requirements" "$torch/stamp"
}

# count_fetched MEGABYTES: pip's lines, each after how much of these it has fetched, as follow_ninja reads it.
count_fetched() {
  local line fetched=0 size=0
  while IFS= read -r line; do
    fetched=$((fetched + size)) size=0
    if [[ $line =~ (Downloading|Using\ cached)\ .*\(([0-9]+)(\.[0-9])?\ MB\) ]]; then size=${BASH_REMATCH[2]}; fi
    printf '[%d/%d] %s\n' $fetched "$1" "$line"
  done
}

# build_torch: the extension, with this machine's instructions; silent when all is up to date. KVMELD_TORCH_TESTS=1: and
# what its tests run beside it. KVMELD_BUILD: a build of the library with
# the same flags, up to date, which is linked to.
build_torch() {
  local dir=$torch/extension log=$torch/build.log
  : >"$log"
  if [[ ! $dir/build.ninja -nt $torch/stamp ]] ||
    ! grep -qxF "CMAKE_HOME_DIRECTORY:INTERNAL=$root/examples/torch" "$dir/CMakeCache.txt" ||
    ! grep -qxF "KVMELD_BUILD:PATH=${KVMELD_BUILD:-}" "$dir/CMakeCache.txt"; then
    rm -f "$dir/CMakeCache.txt" # of another place
    cmake -S "$root/examples/torch" -B "$dir" -G Ninja -DPython_EXECUTABLE="$torch/venv/bin/python" \
      -DKVMELD_BUILD="${KVMELD_BUILD:-}" >"$log" 2>&1 || fail "$log" "cmake could not configure $dir:"
  fi
  NINJA_STATUS='[%f/%t] ' ninja -C "$dir" -j "$jobs" kvmeld_torch step_bench \
    ${KVMELD_TORCH_TESTS:+kvmeld_torch_emulated kvmeld_torch_compressed} 2>&1 | follow_ninja "$log" ||
    fail "$log" "the extension does not build:"
}
