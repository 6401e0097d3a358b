/// The parameters of a policy by their names, for the command line.
#pragma once

namespace evaluate::detail {

/// Calls `f(name, member)` for every parameter of `p` that is a number.
template <class Policy, class F>
void for_each_parameter(Policy& p, F f) {
  if constexpr (requires { p.sinks = {}; }) f("sinks", p.sinks);
  if constexpr (requires { p.recent = {}; }) f("recent", p.recent);
  if constexpr (requires { p.window = {}; }) f("window", p.window);
  if constexpr (requires { p.kernel = {}; }) f("kernel", p.kernel);
  if constexpr (requires { p.proximity = {}; }) f("proximity", p.proximity);
  if constexpr (requires { p.residual = {}; }) f("residual", p.residual);
  if constexpr (requires { p.alpha = {}; }) f("alpha", p.alpha);
  if constexpr (requires { p.decay = {}; }) f("decay", p.decay);
  if constexpr (requires { p.share = {}; }) f("share", p.share);
  if constexpr (requires { p.beta = {}; }) f("beta", p.beta);
  if constexpr (requires { p.heavy = {}; }) f("heavy", p.heavy);
  if constexpr (requires { p.epsilon = {}; }) f("epsilon", p.epsilon);
  if constexpr (requires { p.sigma = {}; }) f("sigma", p.sigma);
  if constexpr (requires { p.similarity = {}; }) f("similarity", p.similarity);
  if constexpr (requires { p.ridge = {}; }) f("ridge", p.ridge);
  if constexpr (requires { p.drop = {}; }) f("drop", p.drop);
  if constexpr (requires { p.floor = {}; }) f("floor", p.floor);
  if constexpr (requires { p.a_round = {}; }) f("a_round", p.a_round);
  if constexpr (requires { p.steady = {}; }) f("steady", p.steady);
  if constexpr (requires { p.history = {}; }) f("history", p.history);
  if constexpr (requires { p.future = {}; }) f("future", p.future);
  if constexpr (requires { p.rounds = {}; }) f("rounds", p.rounds);
  if constexpr (requires { p.chunk = {}; }) f("chunk", p.chunk);
  if constexpr (requires { p.blend = {}; }) f("blend", p.blend);
  if constexpr (requires { p.merge = {}; }) f("merge", p.merge);
  if constexpr (requires { p.seed = {}; }) f("seed", p.seed);
  if constexpr (requires { p.period = {}; }) f("period", p.period);
  if constexpr (requires { p.omp = {}; }) f("omp", p.omp);
  if constexpr (requires { p.scale_values = {}; }) f("scale_values", p.scale_values);
  if constexpr (requires { p.gaps_break = {}; }) f("gaps_break", p.gaps_break);
  if constexpr (requires { p.merge_first = {}; }) f("merge_first", p.merge_first);
  if constexpr (requires { p.merge_prompt = {}; }) f("merge_prompt", p.merge_prompt);
  if constexpr (requires { p.threshold = {}; }) f("threshold", p.threshold);
  if constexpr (requires { p.gamma = {}; }) f("gamma", p.gamma);
  if constexpr (requires { p.with_position = {}; }) f("with_position", p.with_position);
  if constexpr (requires { p.table = {}; }) f("table", p.table);
  if constexpr (requires { p.prompt.ridge = {}; }) {  // fold's parts
    f("recent_share", p.recent_share);
    f("pool", p.prompt.pool);
    f("leverage_ridge", p.prompt.leverage_ridge);
    f("outlier", p.prompt.outlier);
    f("rounds", p.prompt.rounds);
    f("floor", p.prompt.floor);
    f("ridge", p.prompt.ridge);
    f("polish", p.prompt.polish);
    f("rate", p.prompt.rate);
    f("queries", p.decode.queries);
    f("stride", p.decode.stride);
    f("period", p.decode.period);
  }
  if constexpr (requires { p.as = {}; }) f("as", p.as);           // keepkv: 0 paper, 1 code
  if constexpr (requires { p.joins = {}; }) f("joins", p.joins);  // kvmerger: 0 threshold, 1 budget
}

}  // namespace evaluate::detail
