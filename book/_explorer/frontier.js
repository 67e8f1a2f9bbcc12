// Draws what the data of the page say for the budget that the reader chooses; see experiments/widgets/explorer.py.
const drawTimeline = (svg, data, plan, limit) => {
  const most = Math.max(...data.plans.map((one) => Object.values(one.live)[0].length));
  const highest = data.baseline.peak_bytes * 1.06;
  const x = (bucket) => LEFT + ((RIGHT - LEFT) * bucket) / most;
  const y = (bytes) => BOTTOM - ((BOTTOM - TOP) * bytes) / highest;
  const parts = [];
  const count = Object.values(plan.live)[0].length;
  let below = new Array(count).fill(0);
  for (const name of data.categories) {
    const above = below.map((bytes, i) => bytes + plan.live[name][i]);
    const up = above.map((bytes, i) => `L${x(i).toFixed(1)} ${y(bytes).toFixed(1)}H${x(i + 1).toFixed(1)}`).join("");
    const down = below.map((bytes, i) => `L${x(i + 1).toFixed(1)} ${y(bytes).toFixed(1)}H${x(i).toFixed(1)}`);
    parts.push(`<path fill="${COLORS[name]}" d="M${x(0)} ${y(0)}${up}${down.reverse().join("")}Z"/>`);
    below = above;
  }
  parts.push(`<path class="limit" d="M${LEFT} ${y(limit).toFixed(1)}H${RIGHT}"/>`);
  const middle = x(plan.boundary).toFixed(1);
  parts.push(`<path class="broken" d="M${middle} ${TOP}V${BOTTOM}"/>`);
  parts.push(`<text x="${middle - 4}" y="${TOP + 8}" text-anchor="end">forward</text>`);
  parts.push(`<text x="${+middle + 4}" y="${TOP + 8}">backward</text>`);
  const ticks = steps(highest / MIB, 5).map((at) => [y(at * MIB), +at.toFixed(3)]);
  svg.innerHTML = frame([], ticks, "allocations and frees, in order", "live dynamic memory (MiB)") + parts.join("");
  svg.setAttribute("aria-label", `Live memory of the planned step over its events: it stays within ${mib(limit)}, its peak is ${mib(plan.peak_bytes)}.`);
};

const drawFront = (svg, data, plan, limit) => {
  const share = (bytes) => bytes / data.baseline.peak_bytes;
  const highest = 1.5 * Math.max(0.1, ...data.peers.map((peer) => peer.recompute_flops / data.baseline.flops));
  const widest = Math.max(1, ...data.peers.map((peer) => share(peer.peak_bytes))) * 1.03;
  const x = (peak) => LEFT + ((RIGHT - LEFT) * share(peak)) / widest;
  const y = (flops) => Math.max(TOP, BOTTOM - ((BOTTOM - TOP) * flops) / data.baseline.flops / highest);
  const parts = [];
  // A plan fits into every larger budget, so its step leads to the right: drawn from the right, heights come late.
  let path = `M${x(data.baseline.peak_bytes).toFixed(1)} ${y(data.front[0].recompute_flops).toFixed(1)}`;
  for (const point of data.front) path += `V${y(point.recompute_flops).toFixed(1)}H${x(point.peak_bytes).toFixed(1)}`;
  parts.push(`<path class="front" d="${path}"/>`);
  for (const peer of data.peers) {
    parts.push(`<rect class="peer" x="${(x(peer.peak_bytes) - 4).toFixed(1)}" y="${(y(peer.recompute_flops) - 4).toFixed(1)}" width="8" height="8"/>`);
  }
  parts.push(`<path class="limit" d="M${x(limit).toFixed(1)} ${TOP}V${BOTTOM}"/>`);
  parts.push(`<circle class="here" r="6" cx="${x(plan.peak_bytes).toFixed(1)}" cy="${y(plan.recompute_flops).toFixed(1)}"/>`);
  const xTicks = steps(widest, 6).map((at) => [x(at * data.baseline.peak_bytes), +at.toFixed(2)]);
  const yTicks = steps(highest, 5).map((at) => [y(at * data.baseline.flops), `${Math.round(100 * at)}%`]);
  svg.innerHTML = frame(xTicks, yTicks, "dynamic peak, fraction of the baseline's", "recomputed FLOPs") + parts.join("");
  svg.setAttribute("aria-label", `The Pareto frontier: at ${percent(share(plan.peak_bytes))} of the baseline's peak, ${percent(plan.recompute_flops / data.baseline.flops)} of the FLOPs are recomputed.`);
};

// One row for every part of the model: blocks by their number, everything else by its first name.
const partOf = (module) => /^[^.]+(\.\d+)?/.exec(module)?.[0] ?? "loss and glue";

const build = (root, data) => {
  const first = data.budgets[0].percent, last = data.budgets.at(-1).percent;
  const id = "frontier-explorer-budget";
  element("label", root, "", { for: id }).innerHTML = 'Budget: <output class="budget"></output>';
  const slider = element("input", root, "", {
    type: "range", id, min: first, max: last, step: data.budgets[1].percent - first, value: 40,
  });
  const answer = element("p", root, "", { class: "answer", "aria-live": "polite" });
  const numbers = element("dl", root);
  const fields = {};
  for (const name of ["peak", "again", "cost", "bound", "gap", "saved"]) {
    const box = element("div", numbers);
    fields[name] = [element("dt", box), element("dd", box)];
  }
  const charts = element("div", root, "", { class: "charts" });
  const timeline = drawing(element("div", charts), "Live memory of the planned step");
  const front = drawing(element("div", charts), "The plan on the Pareto frontier");
  const legend = element("ul", root, "", { class: "legend" });
  for (const name of [...data.categories].reverse()) key(legend, name, { style: `background:${COLORS[name]}` });
  const line = "height:0;vertical-align:.25rem;border-top:";
  key(legend, "budget", { style: `${line}2px dashed var(--pst-color-danger)` });
  key(legend, "plan", { style: `${line}3px solid #0173b2` });
  key(legend, "PyTorch's tools", { style: "border:2px solid #b5402f" });

  element("h4", root, "The fate of every activation, as wide as it has bytes");
  const fateKeys = element("ul", root, "", { class: "legend" });
  for (const name of ["saved", "recomputed"]) key(fateKeys, name, { class: `key ${name}` });
  const grid = element("div", root, "", { class: "fates" });
  const rows = new Map();
  data.activations.forEach((activation, index) => {
    const part = partOf(activation.module);
    if (!rows.has(part)) {
      const name = element("span", grid, part, { class: "module" });
      const strip = element("div", grid, "", { class: "strip", role: "img" });
      rows.set(part, { name, strip, kept: element("span", grid, "", { class: "kept" }), cells: [] });
    }
    const row = rows.get(part);
    const cell = element("span", row.strip, "", { style: `flex-grow:${activation.bytes}` });
    row.cells.push({ cell, activation, index });
  });

  const show = () => {
    const row = data.budgets.find((one) => one.percent === +slider.value);
    const refused = row.plan === null;
    const plan = data.plans[refused ? data.budgets.find((one) => one.plan !== null).plan : row.plan];
    const limit = Math.floor((row.percent * data.baseline.peak_bytes) / 100);
    root.querySelector(".budget").textContent = `${row.percent} % of the baseline's dynamic peak, ${mib(limit)}`;
    slider.setAttribute("aria-valuetext", `${row.percent} percent, ${refused ? "infeasible" : `peak ${mib(plan.peak_bytes)}`}`);
    const kept = [...plan.fates].filter((fate) => fate === "s").length;
    answer.className = refused ? "answer refused" : "answer";
    answer.textContent = refused
      ? `Infeasible: the smallest feasible budget is ${mib(data.least_bytes)}, ` +
        `${(data.least_bytes - limit).toLocaleString("en-US")} bytes more. Below is the plan for the smallest feasible budget of the slider.`
      : `The plan saves ${kept} of ${plan.fates.replaceAll("-", "").length} activations and recomputes ${percent(plan.recompute_flops / data.baseline.flops)} ` +
        `of the baseline's FLOPs.`;
    const gap = row.lower_bound === null ? null : (1 + plan.cost) / (1 + row.lower_bound) - 1;
    const texts = {
      peak: ["dynamic peak", `${mib(plan.peak_bytes)}, ${percent(plan.peak_bytes / data.baseline.peak_bytes)}`],
      again: ["recomputed FLOPs", percent(plan.recompute_flops / data.baseline.flops, 2)],
      cost: ["cost, FLOPs and traffic", percent(plan.cost, 2)],
      bound: ["lower bound of the cost", refused || row.lower_bound === null ? "none" : percent(row.lower_bound, 2)],
      gap: ["optimality gap", refused || gap === null ? "unknown" : percent(gap, 2)],
      saved: ["saved for backward", mib(plan.saved_bytes)],
    };
    for (const [name, [title, value]] of Object.entries(texts)) {
      fields[name][0].textContent = title;
      fields[name][1].textContent = value;
    }
    drawTimeline(timeline, data, plan, limit);
    drawFront(front, data, plan, limit);
    for (const [part, { name, strip, kept: label, cells }] of rows) {
      let bytes = 0, all = 0;
      for (const { cell, activation, index } of cells) {
        const fate = { s: "saved", p: "packed", r: "recomputed" }[plan.fates[index]];
        cell.className = fate ?? "";
        cell.hidden = !fate; // not needed by this plan's backward
        if (!fate) continue;
        cell.title = `${activation.name}${activation.module ? ` in ${activation.module}` : ""}: ${mib(activation.bytes)}, ${fate}`;
        all += activation.bytes;
        bytes += fate === "saved" ? activation.bytes : 0;
      }
      for (const part of [name, strip, label]) part.hidden = !all;
      label.textContent = `${(bytes / MIB).toFixed(1)} / ${mib(all)}`;
      strip.setAttribute("aria-label", `${part}: ${mib(bytes)} of ${mib(all)} saved`);
    }
  };
  slider.addEventListener("input", show);
  show();
};

start("frontier-explorer", build);
