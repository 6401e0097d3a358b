// SPDX-License-Identifier: MIT
/// A context of the program, compressed: what its calls become.
#pragma once

#include <ggml-cpu.h>

#include <algorithm>  // std::max
#include <cstdint>
#include <limits>  // std::numeric_limits
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "llama_cpp/llama_cpp.hpp"
#include "llama_cpp/run/next.hpp"
#include "llama_cpp/run/options.hpp"

namespace kvmeld::llama {

extern template class compressor<any_policy>;  // compressor.cpp of this folder compiles it

namespace run {

/// Of a program's token: of which sequences, and does the program want its logits?
struct program_token {
  std::vector<llama_seq_id> sequences;
  bool output = false;
};

class context {
 public:
  /// Makes it as the program asked, with the cells that its batches need.
  /// Refused: what the adapter refuses, and graphs that it does not know.
  context(llama_model* model, llama_context_params p, const settings& s) {
    expects(p.ctx_type == LLAMA_CONTEXT_TYPE_DEFAULT,
            "llama.cpp: expected a context of the default type, got another (as of MTP)");
    const auto round = [](std::uint32_t n) { return (n + 255) / 256 * 256; };
    const auto sequences = std::max(p.n_seq_max, 1U);
    const auto asked = p.n_ctx > 0 ? p.n_ctx : static_cast<std::uint32_t>(trained(model));
    // As llama.cpp divides them. A unified cache numbers a batch's tokens in the program's order.
    tokens_ = round(p.kv_unified ? asked : asked / sequences);
    cells_ = p.kv_unified ? tokens_ : tokens_ * sequences;
    p.kv_unified = true;
    // Cells hold a batch, and of each sequence the newest token or a window's.
    const auto recent = static_cast<std::uint32_t>(std::max(llama_model_n_swa(model), 1));
    p.n_batch = std::min(p.n_batch, cells_);
    p.n_ctx = depends_on_context(model) ? cells_ : round(p.n_batch + sequences * recent);
    const index_t room = static_cast<index_t>(tokens_);
    kvmeld::llama::options how{
        .how = mode::own_attention, .limits = {}, .capacity = room + 1, .rows = s.rows};
    budget limit{.is_shared = s.is_shared()};
    if (s.budget.in == amount::unit::slots) {
      limit.slots = static_cast<index_t>(s.budget.value);
      how.capacity = std::max(room, limit.slots) + 1;
    } else if (s.budget.in == amount::unit::bytes) {
      limit.size = static_cast<std::int64_t>(s.budget.value);
    } else {
      how.share = s.budget.value;
    }
    how.limits = {limit};
    kv_ = std::make_unique<compressor<any_policy>>(model, s.policy, how);
    kv_->attach(p);
    context_.reset(llama_init_from_model(model, p));
    expects(context_ != nullptr, "llama.cpp: expected a context, got none");
    memory_ = llama_get_memory(context_.get());
    kv_->bind(context_.get());
    saved_.resize(sequences);
    keep_threads(std::max(p.n_threads, p.n_threads_batch));
    try_out(model);
    // No slots: a policy that keeps all, in rows of few bits.
    std::fprintf(stderr,
                 "kvmeld-run: %.*s, %d slots per head%s of %u tokens per sequence; %u cells\n",
                 static_cast<int>(s.policy.name().size()), s.policy.name().data(),
                 kv_->slots() > 0 ? kv_->slots() : room, s.is_shared() ? " on average" : "",
                 tokens_, p.n_ctx);
  }

  llama_context* get() const { return context_.get(); }
  llama_memory_t memory() const { return memory_; }
  std::uint32_t cells() const { return cells_; }  ///< that the program thinks there are
  std::uint32_t tokens_per_sequence() const { return tokens_; }

  /// `run` decodes a batch of these tokens. What is wanted of a sequence's first token is wanted of
  /// a text that the program writes, or takes from a draft: no prompt's.
  template <class Run>
  std::int32_t decode(const std::vector<program_token>& batch, Run run) {
    std::vector<announced_token> tokens;
    std::vector<char> begun(saved_.size()), writes(saved_.size());
    for (const program_token& t : batch) {
      expects(t.sequences.size() == 1,
              "llama_decode: expected tokens of one sequence each, got one of ",
              t.sequences.size());
      const llama_seq_id of = expect_sequence("llama_decode", t.sequences[0]);
      if (char& first = begun[static_cast<std::size_t>(of)]; first == 0) {
        first = 1, writes[static_cast<std::size_t>(of)] = t.output ? 1 : 0;
      }
      tokens.push_back(
          {of, writes[static_cast<std::size_t>(of)] != 0 ? token_kind::step : token_kind::text});
    }
    changed();
    kv_->announce(std::move(tokens));
    const std::int32_t code = run();
    try {
      kv_->check();
    } catch (...) {
      if (kv_->broken()) {
        clear(true);  // layers are of different lengths
      }
      throw;
    }
    return code;
  }

  void clear(bool data) {
    changed();
    llama_memory_clear(memory_, data);
    kv_->reset();
  }
  /// As `llama_memory_seq_rm`: true where nothing is there, or all is removed; a part stays.
  bool remove(llama_seq_id s, llama_pos from, llama_pos to) {
    const auto list = chosen("llama_memory_seq_rm", s);
    if (std::ranges::any_of(list, [&](llama_seq_id i) { return covers(i, from, to) == part; })) {
      return false;
    }
    for (const llama_seq_id i : list) {
      if (covers(i, from, to) == all) {
        changed();
        kv_->remove(i);
      }
    }
    return true;
  }
  void copy(llama_seq_id a, llama_seq_id b, llama_pos from, llama_pos to) {
    expect_sequence("llama_memory_seq_cp", a), expect_sequence("llama_memory_seq_cp", b);
    const extent e = a != b ? covers(a, from, to) : nothing;
    expects(e != part, "llama_memory_seq_cp: expected a whole sequence, got positions ", from,
            " to ", to, ": no part of a compressed one can be copied");
    if (e == all) {
      changed();
      kv_->end_prompt(a);
      kv_->copy(a, b);
    }
  }
  void keep(llama_seq_id s) {
    for (const llama_seq_id i : chosen("llama_memory_seq_keep", -1)) {
      if (i != s) {
        remove(i, -1, -1);
      }
    }
  }
  /// Refused: positions that would change.
  void expect_unmoved(const char* call, llama_seq_id s, llama_pos from, llama_pos to) {
    for (const llama_seq_id i : chosen(call, s)) {
      expects(covers(i, from, to) == nothing, call, ": expected llama_memory_can_shift to be ",
              "asked first, got positions to move: those of a compressed sequence stay");
    }
  }
  llama_pos newest(llama_seq_id s) const { return llama_memory_seq_pos_max(memory_, s); }

  /// A sequence's bytes; none where it has no tokens. They are kept until something changes: a
  /// program asks for their number first.
  const std::string& save(llama_seq_id s) {
    std::string& bytes = saved_[static_cast<std::size_t>(expect_sequence("llama_state", s))];
    if (bytes.empty() && newest(s) >= 0) {
      std::ostringstream out;
      kv_->end_prompt(s);
      kv_->save(out, s);
      bytes = std::move(out).str();
    }
    return bytes;
  }
  /// Returns how many of the bytes were read.
  std::size_t load(const std::string& bytes, llama_seq_id s) {
    expect_sequence("llama_state", s);
    changed();
    kv_->remove(s);
    if (bytes.empty()) {
      return 0;
    }
    std::istringstream in(bytes);
    kv_->load(in, s);
    const std::streamoff read = in.tellg();
    return read < 0 ? bytes.size() : static_cast<std::size_t>(read);
  }
  void drop_saved(llama_seq_id s) { std::string().swap(saved_[static_cast<std::size_t>(s)]); }
  llama_seq_id sequences() const { return static_cast<llama_seq_id>(saved_.size()); }

 private:
  enum extent { nothing, part, all };

  static index_t trained(const llama_model* model) { return llama_model_n_ctx_train(model); }
  /// Does the length of the context decide how keys are rotated?
  static bool depends_on_context(const llama_model* model) {
    return !metadatum(model, metadatum(model, "general.architecture") +
                                 ".rope.scaling.original_context_length")
                .empty();
  }
  llama_seq_id expect_sequence(const char* call, llama_seq_id s) const {
    expects(s >= 0 && s < sequences(), call, ": expected a sequence of 0 to ", sequences() - 1,
            ", got ", s);
    return s;
  }
  std::vector<llama_seq_id> chosen(const char* call, llama_seq_id s) const {
    std::vector<llama_seq_id> list;
    for (llama_seq_id i = 0; i < sequences(); ++i) {
      list.push_back(i);
    }
    return s < 0 ? list : std::vector{expect_sequence(call, s)};
  }
  /// How much of a sequence is at positions `from` to `to`, without `to`; negative: the ends.
  extent covers(llama_seq_id s, llama_pos from, llama_pos to) const {
    const llama_pos last = newest(s), first = std::max(from, 0),
                    end = to < 0 ? std::numeric_limits<llama_pos>::max() : to;
    return first > last || end <= first ? nothing : first == 0 && end > last ? all : part;
  }
  void changed() {
    std::ranges::for_each(saved_, [](std::string& s) { std::string().swap(s); });
  }

  /// Threads that wait for the next node, where llama.cpp would begin new ones: its graphs come in
  /// parts, one for each node that the adapter asks for. A program may attach others.
  void keep_threads(int count) {
    const auto make = reinterpret_cast<decltype(&ggml_threadpool_new)>(
        dlsym(RTLD_DEFAULT, "ggml_threadpool_new"));
    const auto end = reinterpret_cast<decltype(&ggml_threadpool_free)>(
        dlsym(RTLD_DEFAULT, "ggml_threadpool_free"));
    if (count > 1 && make != nullptr && end != nullptr) {
      auto p = ggml_threadpool_params_default(count);
      threads_ = {make(&p), end};
      llama_attach_threadpool(context_.get(), threads_.get(), nullptr);
    }
  }

  /// Two tokens, so that a graph that is not known is refused before the program's first.
  void try_out(const llama_model* model) {
    const llama_token bos = llama_vocab_bos(llama_model_get_vocab(model));
    std::vector<llama_token> tokens(2, std::max(bos, 0));
    const std::int32_t code = decode({{{0}}, {{0}, true}}, [&] {
      return llama_decode(context_.get(), llama_batch_get_one(tokens.data(), 2));
    });
    expects(code == 0, "llama.cpp: expected a model that decodes a token, got ", code);
    clear(true);
  }

  std::unique_ptr<compressor<any_policy>> kv_;
  std::unique_ptr<ggml_threadpool, void (*)(ggml_threadpool*)> threads_{nullptr, nullptr};
  llama_context_ptr context_;  // goes first: it calls the compressor
  llama_memory_t memory_ = nullptr;
  std::uint32_t cells_ = 0, tokens_ = 0;
  std::vector<std::string> saved_;  // [sequences]
};

}  // namespace run
}  // namespace kvmeld::llama
