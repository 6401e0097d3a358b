/// A KV head of whatever storage: what policies are compiled for.
#pragma once

#include <algorithm>  // std::min
#include <cstddef>    // std::ptrdiff_t
#include <limits>     // std::numeric_limits

#include "kvmeld/memory/attention_spec.hpp"
#include "kvmeld/memory/layout.hpp"
#include "kvmeld/memory/row.hpp"

namespace kvmeld {
inline namespace v0 {

/// What a KV head keeps beside its rows. A view of memory that the engine or a cache owns.
struct slot_metadata {
  float* log_mass = nullptr;        ///< [capacity]
  index_t* position = nullptr;      ///< [capacity]
  index_t* length = nullptr;        ///< slots in use
  index_t* tokens_total = nullptr;  ///< tokens ever appended: the next token's position
};

/// A KV head without its rows, wherever these lie: a log-mass and a position per slot, lengths, and
/// what the model computes with it. A view, as those of heads are that start from it.
class head_base {
 public:
  /// `spec`: of the head's layer, checked. It is not copied and must outlive the view.
  head_base(const slot_metadata& slots, index_t capacity, const attention_spec& spec)
      : slots_(slots),
        spec_(&spec),
        capacity_(capacity),
        dim_(spec.key_dim),
        group_(spec.group),
        scale_(spec.scale) {}

  /// What the model computes in this head's layer.
  const attention_spec& spec() const { return *spec_; }

  index_t length() const { return *slots_.length; }
  index_t tokens_total() const { return *slots_.tokens_total; }
  index_t capacity() const { return capacity_; }
  index_t dim() const { return dim_; }
  index_t group() const { return group_; }
  float scale() const { return scale_; }
  bool check_finite() const { return spec_->check_finite; }

  float& log_mass(index_t s) const { return slots_.log_mass[s]; }
  index_t& position(index_t s) const { return slots_.position[s]; }

  /// Keeps the first `length` slots. Only ever shortens; `push` lengthens.
  void truncate(index_t length) const {
    expects(length >= 0 && length <= *slots_.length, "truncate: expected 0 to ", *slots_.length,
            " slots, got ", length);
    *slots_.length = length;
  }

  /// Sets both lengths, for slots whose contents come from outside: `load` writes them next.
  void restore(index_t length, index_t tokens_total) const {
    expects(length >= 0 && length <= capacity() && length <= tokens_total,
            "restore: expected 0 to ", std::min(capacity(), tokens_total), " slots, got ", length);
    *slots_.length = length;
    *slots_.tokens_total = tokens_total;
  }

  /// The next slot, at the next position, with log-mass 0; its rows are the caller's to write.
  index_t push_metadata() const {
    expects(errc::no_capacity, length() < capacity(), "push: expected a free slot, got all ",
            capacity(), " slots in use");
    expects(errc::no_capacity, tokens_total() < std::numeric_limits<index_t>::max(),
            "push: expected fewer than ", std::numeric_limits<index_t>::max(),
            " tokens in total, got ", tokens_total());
    const index_t s = (*slots_.length)++;
    log_mass(s) = 0.0F;
    position(s) = (*slots_.tokens_total)++;
    return s;
  }

 private:
  slot_metadata slots_;
  const attention_spec* spec_;
  index_t capacity_, dim_, group_;  // beside `spec_`, for loops that store through bytes
  float scale_;
};

/// One KV head by strides in bytes, or by a table of pages, and its scalar at run time. `head_view`
/// and `paged_head` become one (`ref`) before a policy sees them, so that policies, attention and
/// the rest are compiled once, not once for each scalar and layout. A view.
class head_ref : public head_base {
 public:
  using scalar = any_scalar;

  using layout = kvmeld::layout<std::byte>;

  /// A table without pages: rows are strided.
  head_ref(const head_base& base, scalar_type type, const layout& keys, const layout& values,
           const page_table& table = {})
      : head_base(base), keys_(keys), values_(values), table_(table), type_(type) {}

  row<any_scalar> key(index_t s) const { return at(keys_, s); }
  row<any_scalar> value(index_t s) const { return at(values_, s); }

  /// Refused: slots `from` to `to` − 1 that the table has no pages for.
  void expect_pages(index_t from, index_t to) const {
    for (index_t i = table_.pages == nullptr ? 0 : from / table_.slots;
         table_.pages != nullptr && i < table_.taken_by(to); ++i) {
      expects(errc::no_page, table_.pages[i] >= 0, "push: expected a page for slot ",
              std::max(from, i * table_.slots), ", got ", table_.pages[i]);
    }
  }
  /// Appends one token `[dim]` at the next position, with log-mass 0. Refused: no slot, no page.
  template <class T>
  void push(const T* key, const T* value) const {
    expect_pages(length(), std::min(length() + 1, capacity()));
    const index_t s = push_metadata();
    detail::store_row(key, this->key(s), dim());
    detail::store_row(value, this->value(s), dim());
  }

  const layout& keys() const { return keys_; }
  const layout& values() const { return values_; }

  /// Are the rows of `l` floats, contiguous and evenly spaced?
  bool even_floats(const layout& l) const {
    constexpr std::ptrdiff_t size = sizeof(float);
    return type_ == scalar_type::float32 && table_.pages == nullptr && l.element == size &&
           l.row >= dim() * size;
  }

 private:
  row<any_scalar> at(const layout& l, index_t s) const {
    return {table_.pages == nullptr ? l.slot(s) : l.slot(s, table_), l.element, type_};
  }

  layout keys_, values_;
  page_table table_;
  scalar_type type_;
};

}  // namespace v0
}  // namespace kvmeld
