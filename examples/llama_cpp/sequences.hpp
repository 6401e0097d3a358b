// SPDX-License-Identifier: MIT
/// The engine's sequences: which tokens of a micro-batch are of which, and what cells each has.
#pragma once

#include <llama.h>

#include <algorithm>  // std::ranges::find
#include <span>
#include <utility>  // std::pair
#include <vector>

#include "llama_cpp/nodes.hpp"

namespace kvmeld::llama {

/// What the engine has of one sequence.
struct sequence {
  std::vector<index_t> cells, positions;  ///< in use, the newest last; a cell of -1 is not known
  std::int64_t seen = 0;                  ///< tokens so far
  index_t drafted = 0;                    ///< the last of them, which may yet be taken back

  std::int64_t decided() const { return seen - drafted; }
  /// The first `kept` tokens of the draft count, the others were never there.
  void decide(index_t kept) {
    const auto gone = static_cast<std::size_t>(drafted - kept);
    cells.resize(cells.size() - gone), positions.resize(positions.size() - gone);
    seen -= drafted - kept;
    drafted = 0;
  }
  /// Forgets all cells but `keep`, the newest `recent` among them. Their positions: from, to.
  std::pair<index_t, index_t> free(index_t keep, index_t recent) {
    const auto from = positions.begin() + (keep - recent), to = positions.end() - recent;
    const std::pair freed(*from, *to);
    positions.erase(from, to);
    cells.erase(cells.begin() + (keep - recent), cells.end() - recent);
    return freed;
  }
};

/// What a token of a batch is to its sequence.
enum class token_kind {
  text,   ///< a prompt's, or a part of one's, if several follow one another; alone a step's
  step,   ///< a step's each, however many: what was a prompt before them has ended
  draft,  ///< a draft's, which may be taken back
};
struct announced_token {
  llama_seq_id sequence = 0;
  token_kind kind = token_kind::text;
};

/// The tokens of one sequence in a micro-batch, at consecutive positions.
struct chunk {
  index_t request = 0;
  token_kind kind = token_kind::text;
  index_t first = 0;                 ///< position
  std::vector<index_t> tokens = {};  ///< which of the micro-batch's
  std::vector<index_t> cells = {};   ///< where the engine has them
  bool prompt = false;               ///< are they a prompt's, or a part of one's?
  bool together = false;             ///< ... measured on all of their queries, not one by one?
};

/// All of them: with own attention as many as the context has, each a request of its own; in repack
/// one, whichever of the engine's it is.
class sequences {
  static auto& at(auto& list, index_t i) { return list[static_cast<std::size_t>(i)]; }

 public:
  void reset(index_t count, bool own) {
    own_ = own;
    all_.assign(static_cast<std::size_t>(count), {});
    announced_.clear();
  }
  void bind(llama_memory_t memory, llama_seq_id room) { memory_ = memory, room_ = room; }
  index_t count() const { return static_cast<index_t>(all_.size()); }
  sequence& operator[](index_t r) { return at(all_, r); }
  const std::vector<sequence>& all() const { return all_; }
  /// The engine's number of request `r`: in repack any.
  llama_seq_id id(index_t r) const { return own_ ? r : -1; }
  /// Refused: a sequence that the context has no room for, repack.
  index_t expect_own(const char* call, llama_seq_id s) const {
    expects(own_, call, ": expected mode own_attention, got repack: its cells are of one sequence");
    expects(s >= 0 && s < count(), call, ": expected a sequence of 0 to ", count() - 1,
            " (n_seq_max when attached), got ", s);
    return s;
  }

  /// Says whose the next batch's tokens are, and what.
  void announce(std::vector<announced_token> tokens) {
    for (const announced_token& t : tokens) {
      (void)expect_own("announce", t.sequence);
    }
    announced_ = std::move(tokens), next_ = 0;
  }
  void forget_announcement() { announced_.clear(); }

  /// Requests of which the engine has no token any more.
  std::vector<index_t> removed() const {
    std::vector<index_t> gone;
    for (index_t r = 0; own_ && memory_ != nullptr && r < count(); ++r) {
      if (at(all_, r).seen > 0 && llama_memory_seq_pos_max(memory_, r) < 0) {
        gone.push_back(r);
      }
    }
    return gone;
  }

  /// A micro-batch's tokens by sequence. Refused: positions that do not follow on those before,
  /// tokens of several sequences that were not announced.
  std::vector<chunk> split(std::span<const index_t> positions) {
    std::vector<chunk> chunks;
    const bool told = !announced_.empty();
    const index_t only = told ? 0 : only_sequence();
    for (std::size_t i = 0; i < positions.size(); ++i) {
      expects(!told || next_ < announced_.size(), "llama.cpp: expected the batch of ",
              announced_.size(), " tokens that was announced, got more");
      const auto said = told ? announced_[next_++] : announced_token{only};
      const index_t r = said.sequence;
      auto c = std::ranges::find(chunks, r, &chunk::request);
      if (c == chunks.end()) {
        chunks.push_back({.request = r, .kind = said.kind, .first = positions[i]});
        c = chunks.end() - 1;
        const sequence& s = at(all_, r);
        expects(c->first == 0 || (c->first >= s.decided() && c->first <= s.seen),
                "llama.cpp: expected sequence ", r, " at consecutive positions, next ", s.seen,
                ", got ", c->first,
                s.seen == 0 ? " (copy begins one with another's tokens)"
                            : " (a draft's tokens alone can be taken back)");
      }
      const index_t next = c->first + static_cast<index_t>(c->tokens.size());
      expects(positions[i] == next, "llama.cpp: expected sequence ", r,
              " at consecutive positions, next ", next, ", got ", positions[i]);
      c->tokens.push_back(static_cast<index_t>(i));
    }
    return chunks;
  }

  /// How many tokens of its draft `llama_memory_seq_rm` has left. Refused: tokens before it gone.
  index_t left(index_t r) const {
    const sequence& s = at(all_, r);
    const std::int64_t left = llama_memory_seq_pos_max(memory_, r) + std::int64_t{1} - s.decided();
    expects(left >= 0 && left <= s.drafted, "accept: expected ", s.decided(), " to ", s.seen,
            " tokens in the engine (a draft's tokens alone can be taken back), got ",
            left + s.decided());
    return static_cast<index_t>(left);
  }

  /// Refused: an engine whose newest token is another than the last seen, that is, graphs went by
  /// in which nothing was recognised. A draft's tokens may be gone; nothing is said of a sequence
  /// that was cleared.
  void expect_seen() const {
    const sequence none;
    for (llama_seq_id s = 0; memory_ != nullptr && s < room_; ++s) {
      const llama_pos newest = llama_memory_seq_pos_max(memory_, s);
      const sequence& of = !own_ ? all_[0] : s < count() ? at(all_, s) : none;
      const std::int64_t got = newest + std::int64_t{1};
      expects(newest < 0 || (got >= of.decided() && got <= of.seen), "llama.cpp: expected ",
              of.seen, " tokens in the engine, got ", got, ": ",
              got < of.seen ? "a draft's tokens alone can be taken back" : another_graph);
    }
  }

 private:
  /// Refused: tokens of a second sequence among the engine's cells. Without an announcement they
  /// would be taken for the first one's.
  index_t only_sequence() const {
    llama_seq_id first = -1;
    for (llama_seq_id s = 0; memory_ != nullptr && s < room_; ++s) {
      if (llama_memory_seq_pos_max(memory_, s) >= 0) {
        expects(first < 0, "llama.cpp: expected tokens of one sequence, got those of sequences ",
                first, " and ", s, own_ ? " (announce the batch)" : " (repack has one)");
        first = s;
      }
    }
    return own_ && first >= 0 && first < count() ? first : 0;
  }

  bool own_ = false;
  std::vector<sequence> all_;
  llama_memory_t memory_ = nullptr;
  llama_seq_id room_ = 1;  // that the context has room for
  std::vector<announced_token> announced_;
  std::size_t next_ = 0;  // of those announced
};

}  // namespace kvmeld::llama
