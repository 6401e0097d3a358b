// Plans of anything: refused by check, and then by apply with nothing changed; or carried out.
#include "bytes.hpp"
#include "kvfold/apply.hpp"
#include "kvfold/cache.hpp"
#include "kvfold/compose.hpp"

namespace {

using kvfold::index_t;

constexpr index_t dim = 3, capacity = 12;

std::vector<float> everything(const kvfold::head_view<float>& head) {
  std::vector<float> all;
  all.reserve(static_cast<std::size_t>(capacity * (2 * dim + 2)));
  for (index_t s = 0; s < head.length(); ++s) {
    all.insert(all.end(), head.key(s).data, head.key(s).data + dim);
    all.insert(all.end(), head.value(s).data, head.value(s).data + dim);
    all.insert(all.end(), {head.log_mass(s), static_cast<float>(head.position(s))});
  }
  return all;
}

/// Does `call` refuse, with nothing changed?
bool refused(const kvfold::head_view<float>& head, const auto& call) {
  const auto before = everything(head);
  try {
    call();
    return false;
  } catch (const kvfold::invalid_argument&) {
    fuzz::must(fuzz::same(everything(head), before), "nothing changed when refused");
    return true;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::bytes in(data, size);
  kvfold::cache<float> kv{{.heads = 1, .dim = dim, .capacity = capacity}};
  const auto head = kv.head(0);
  const std::vector<float> x{1, 2, 3};
  for (int t = in.below(capacity + 1); t > 0; --t) {
    kv.append(0, x, x);
  }
  const kvfold::column columns[] = {{kvfold::column_fold::sum, 1}};
  kvfold::head_state state(columns, 0, capacity);
  kvfold::merge_plan plan;
  plan.reset(in.below(4) == 0 ? static_cast<index_t>(in.next<std::int8_t>()) : head.length());
  while (!in.empty()) {
    switch (in.below(8)) {
      case 0:
        plan.end_row(in.number());
        break;
      case 1:
        refused(head, [&] { plan.correct_values(in.numbers(plan.rows() * dim), dim); });
        break;
      case 2:
        refused(head, [&] { plan.correct_keys(in.numbers(in.below(40)), in.below(5)); });
        break;
      case 3:
        plan.keep(in.below(capacity), in.number());
        break;
      case 4: {
        const kvfold::departure d{in.next<std::int8_t>(), in.next<std::int8_t>(), in.number(),
                                  in.number(), in.number()};
        const index_t length = head.length();
        if (!refused(head, [&] { apply(d, head, state); })) {
          fuzz::must(head.length() == length - (d.leaving >= 0 ? 1 : 0), "one leaves");
        }
        break;
      }
      default:
        plan.add({static_cast<index_t>(in.next<std::int8_t>() % 16), in.number(), in.number()});
    }
  }
  const bool lawful = !refused(head, [&] { check(plan); });
  std::vector<index_t> positions;
  for (index_t r = 0; lawful && r < plan.rows() && plan.length() == head.length(); ++r) {
    positions.push_back(head.position(plan.anchor(r)));
  }
  if (refused(head, [&] { apply(plan, head, state); })) {
    fuzz::must(!lawful || plan.length() != head.length() || plan.dim() != dim,
               "lawful, not refused");
  } else {
    fuzz::must(lawful && head.length() == plan.rows() && state.length() == plan.rows(), "rows");
    for (index_t r = 0; r < plan.rows(); ++r) {
      fuzz::must(head.log_mass(r) == plan.log_mass(r), "log-mass");  // finite: it was checked
      fuzz::must(head.position(r) == positions[static_cast<std::size_t>(r)], "positions");
    }
    const auto after = identity(head);
    (void)compose(after, plan);
  }
  return 0;
}
