# What bench/run makes of Google Benchmark's JSON: a table for the terminal, a script for gnuplot.

def round_to(n): if . == null then "–" else pow(10; n) as $p | (. * $p | round) / $p | tostring end;
# Two figures that count, however small.
def ratio: if . == null then "–" elif . >= 10 then round_to(0) elif . >= 0.1 then round_to(2) elif . >= 0.01 then round_to(3)
  else round_to(4) end;

def named(prefix): .benchmarks[] | select(.name | startswith(prefix));
def one(prefix): [named(prefix)][0];

# [{policy, steps: {"256": …}, compress, given}], by the cost of compressing.
def policies:
  . as $all
  | reduce (.benchmarks[] | select(.name | test("^(step|compress|given_scores)/[^/]+/f32/"))) as $b ({};
      ($b.name | split("/")) as $part
      | .[$part[1]] |= (. // {policy: $part[1], steps: {}})
      | if $part[0] == "step" then .[$part[1]].steps[$part[3] | sub("slots:"; "")] = $b.vs_attention
        elif $part[0] == "compress" then .[$part[1]].compress = $b.vs_attention
        else .[$part[1]].given = $b.vs_attention end)
  | [.[]] | sort_by(.compress // 0);

def table:
  "One thread: reads \(one("floor/read/f32/kib:524288").bytes_per_second / 1e9 | round_to(1)) GB/s from memory, "
    + "\(one("floor/product/f32").flop_per_second / 1e9 | round_to(0)) GFLOP/s in Eigen's products, "
    + "\(one("floor/exp/f32").items_per_second / 1e9 | round_to(1)) exp a ns.",
  "Every figure is a ratio to attention alone (32 heads, or 1 KV head × 4 queries in a prompt, × 128), measured in turn.",
  "",
  "| policy | step, 256 slots | 1024 | compress 4096 → 409 | plan and apply alone |",
  "|---|---|---|---|---|",
  (policies[] | "| `\(.policy)` | \(.steps["256"] | ratio) | \(.steps["1024"] | ratio) | "
    + "\(.compress | ratio) | \(.given | ratio) |"),
  "",
  "A prompt's column sums against the product Q Kᵀ of the same shape (4096 tokens): "
    + "\(one("column_scores/total").vs_gemm | ratio), with log-sum-exp given "
    + "\(one("column_scores/given_log_sum_exp").vs_gemm | ratio); its causal half alone "
    + "\(one("causal_products").vs_gemm | ratio).";

def points(value): to_entries | map(select(.value | value != null) | "\(.value | value) \(.key)") | join("\n");

# A dot and what it stands for, in the line under the picture's title; `x` of the screen.
def legend(n; x; colour; name):
  "set label \(n) '\(name)' at screen \(x), screen legend left offset 0.8,-0.25 point pointtype 7 pointsize 0.6 linecolor '\(colour)'";

def picture:
  policies as $p
  | (114 + 24 * ($p | length)) as $height
  | ($p | to_entries | map("'\(.value.policy)' \(.key)") | join(", ")) as $names
  | "set encoding utf8
set terminal svg size 960,\($height) font 'Helvetica,13' background '#ffffff'
set output 'bench.svg'
set border 1 linecolor '#555555'
set tics textcolor '#333333' nomirror scale 0.5
set logscale x
set yrange [\(($p | length) - 0.5):-0.5]
set grid y linecolor '#e4e4e4' linetype 1
unset key
set multiplot
title = 1 - 14.0 / \($height)
legend = 1 - 38.0 / \($height)
$small << e
\($p | points(.steps["256"]))
e
$middle << e
\($p | points(.steps["1024"]))
e
$compress << e
\($p | points(.compress))
e
$given << e
\($p | points(.given))
e
set tmargin at screen 1 - 70.0 / \($height)
set bmargin at screen 40.0 / \($height)
set style arrow 1 nohead linecolor '#999999' dashtype 3
set lmargin at screen 0.22
set rmargin at screen 0.57
set ytics (\($names)) noenhanced
set xtics ('1' 1, '1.2' 1.2, '1.5' 1.5, '2' 2, '3' 3, '5' 5, '10' 10, '20' 20, '50' 50)
set xrange [0.97:\([$p[].steps[]] | max * 1.05)]
set arrow 1 from 1.15, graph 0 to 1.15, graph 1 arrowstyle 1
set label 5 '1.15' at 1.15, graph 1 center offset 0,0.6 textcolor '#777777'
set label 1 'one decode step / attention alone' at screen 0.395, screen title center
" + legend(2; 0.28; "#56b4e9"; "256 slots") + "\n" + legend(3; 0.39; "#0072b2"; "1024") + "
plot $small using 1:2 with points pointtype 7 pointsize 0.6 linecolor '#56b4e9', \\
     $middle using 1:2 with points pointtype 7 pointsize 0.6 linecolor '#0072b2'
set lmargin at screen 0.61
set rmargin at screen 0.97
unset label 5
set ytics (\($p | to_entries | map("'' \(.key)") | join(", ")))
set xtics ('.0001' 0.0001, '.001' 0.001, '.01' 0.01, '.05' 0.05, '.25' 0.25, '1' 1, '5' 5)
set xrange [*:*]
set arrow 1 from 1, graph 0 to 1, graph 1 arrowstyle 1
set label 1 'a prompt, 4096 → 409 slots / its attention' at screen 0.79, screen title center
" + legend(2; 0.68; "#0072b2"; "compress") + "\n" + legend(3; 0.79; "#e69f00"; "plan and apply alone") + "
plot $given using 1:2 with points pointtype 7 pointsize 0.6 linecolor '#e69f00', \\
     $compress using 1:2 with points pointtype 7 pointsize 0.6 linecolor '#0072b2'
unset multiplot";
