// Draws the animated schematics, frame by frame; see experiments/widgets/ (chain_steps, block_stack, offload_lanes).
// Each is drawn at the width of the page, so that text keeps its size. It rests on a frame that tells most, and plays
// when it comes into view, unless the reader prefers less motion.
const canvas = (parent) => {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("aria-hidden", "true"); // the group has the text, and the slider says what the frame shows
  parent.append(svg);
  return svg;
};

const paint = (svg, width, height, parts) => {
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.innerHTML = parts.join("");
};

// A text of the data gets into the drawing without markup.
const label = (svg, x, y, text, anchor = "start", name = "") => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", "text");
  for (const [key, value] of Object.entries({ x, y, "text-anchor": anchor, class: name })) made.setAttribute(key, value);
  made.textContent = text;
  svg.append(made);
};

const fixed = (number) => number.toFixed(1);
const stairs = (x, top, bottom) => {
  const up = top.map((y, i) => `L${fixed(x(i))} ${fixed(y)}H${fixed(x(i + 1))}`).join("");
  const down = bottom.map((y, i) => `L${fixed(x(i + 1))} ${fixed(y)}H${fixed(x(i))}`).reverse().join("");
  return `M${fixed(x(0))} ${fixed(bottom[0])}${up}${down}Z`;
};

// Live bytes over time, category on category; what is still to come is pale.
const memory = (svg, width, { categories, live, highest, frame, ends, peak, reference, referenceName, boundary, colors, line, xTitle }) => {
  const left = 48, right = width - 4, top = 16, bottom = 136, count = live[0].length;
  const x = (i) => left + ((right - left) * i) / count, y = (bytes) => bottom - ((bottom - top) * bytes) / highest;
  const parts = [`<path class="axis" fill="none" d="M${left} ${top}V${bottom}H${right}"/>`];
  for (const at of steps(highest / MIB, 4)) parts.push(`<text x="${left - 5}" y="${fixed(y(at * MIB) + 4)}" text-anchor="end">${+at.toFixed(3)}</text>`);
  let below = new Array(count).fill(0);
  categories.forEach((name, number) => {
    const above = below.map((bytes, i) => bytes + live[number][i]);
    const shape = (from, to) => stairs((i) => x(from + i), above.slice(from, to).map(y), below.slice(from, to).map(y));
    if (frame > 0) parts.push(`<path fill="${colors[name]}" d="${shape(0, frame)}"/>`);
    if (frame < count) parts.push(`<path class="still" fill="${colors[name]}" d="${shape(frame, count)}"/>`);
    below = above;
  });
  if (line) parts.push(`<path class="line" d="M${line.map((bytes, i) => `${fixed(x(i))} ${fixed(y(bytes))}H${fixed(x(i + 1))}`).join("L")}"/>`);
  parts.push(`<path class="reference" d="M${left} ${fixed(y(reference))}H${right}"/>`);
  parts.push(`<path class="peak-line" d="M${left} ${fixed(y(peak))}H${right}"/>`);
  if (boundary !== undefined) parts.push(`<path class="broken" d="M${fixed(x(boundary))} ${top}V${bottom}"/>`);
  parts.push(`<path class="now-line" d="M${fixed(x(frame))} ${top}V${bottom}"/>`);
  parts.push(`<text x="${left}" y="${top - 5}">peak ${mib(peak)} (dashed)${peak < reference ? `, ${referenceName} ${mib(reference)} (dotted)` : ""}</text>`);
  for (const [at, anchor, text] of ends) parts.push(`<text x="${fixed(x(at))}" y="${bottom + 15}" text-anchor="${anchor}">${text}</text>`);
  parts.push(`<text transform="translate(11 ${(top + bottom) / 2}) rotate(-90)" text-anchor="middle">live MiB</text>`);
  parts.push(`<text x="${(left + right) / 2}" y="${bottom + 30}" text-anchor="middle">${xTitle}</text>`);
  paint(svg, width, 174, parts);
};

// Button, slider and clock. `show(frame)` draws a frame and says what it shows.
const player = (root, controls, { frames, still, seconds, show }) => {
  const button = element("button", controls, "Play", { type: "button" });
  const slider = element("input", controls, "", { type: "range", min: 0, step: 1, "aria-label": "Frame of the animation" });
  const says = element("p", root, "", { class: "answer" });
  let frame = 0, timer = null, seen = false;
  const go = (to) => {
    frame = to;
    slider.max = frames();
    slider.value = frame;
    says.textContent = show(frame);
    slider.setAttribute("aria-valuetext", says.textContent);
  };
  const stop = () => {
    clearInterval(timer);
    timer = null;
    button.textContent = "Play";
  };
  const play = () => {
    if (frame >= frames()) go(0);
    button.textContent = "Pause";
    timer = setInterval(() => (frame < frames() ? go(frame + 1) : stop()), (1000 * seconds) / frames());
  };
  const rest = () => {
    stop();
    go(still());
  };
  button.addEventListener("click", () => (timer ? stop() : play()));
  slider.addEventListener("input", () => {
    stop();
    go(+slider.value);
  });
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  calm.addEventListener("change", () => calm.matches && stop());
  addEventListener("beforeprint", rest);
  new IntersectionObserver(([{ isIntersecting }]) => {
    if (isIntersecting && !seen && !calm.matches && !matchMedia("print").matches) {
      seen = true;
      go(0);
      play();
    } else if (!isIntersecting) stop();
  }, { threshold: 0.6 }).observe(root);
  let width = 0;
  new ResizeObserver(() => {
    if (root.clientWidth === width) return;
    width = root.clientWidth;
    go(Math.min(frame, frames()));
  }).observe(root);
  return { rest, go };
};

const select = (controls, variants, id, chosen) => {
  const box = element("div", controls, "", { class: "choice" });
  element("label", box, "Schedule", { for: id });
  const made = element("select", box, "", { id });
  variants.forEach((variant, place) => element("option", made, variant.label, { value: place }));
  made.selectedIndex = Math.max(0, variants.findIndex((variant) => variant.name === chosen));
  return made;
};

const inner = (root) => {
  const style = getComputedStyle(root);
  return Math.max(240, root.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight));
};

const facts = (list, rows) => {
  list.replaceChildren();
  for (const [title, value] of rows) {
    const box = element("div", list);
    element("dt", box, title);
    element("dd", box, value);
  }
};

const NODES = { s: "activations", t: "temporaries", r: "recomputed" };
const PHASES = { f: "Forward", r: "Recomputation", b: "Backward" };

const buildGraph = (root, data, id) => {
  const controls = element("div", root, "", { class: "controls" });
  const choice = data.variants.length > 1 ? select(controls, data.variants, id, root.dataset.start) : null;
  const about = element("p", root, "", { class: "about" });
  const graph = canvas(root), plot = canvas(root);
  let current = data.variants[0];
  const variant = () => current;
  const total = (one, i) => data.categories.reduce((sum, name) => sum + one.live[name][i], 0);

  const draw = (one, frame) => {
    const width = inner(root), left = 6, pitch = (width - 2 * left) / data.columns.length;
    const x = (column) => left + (column + 0.5) * pitch, forward = 34, backward = 112, r = Math.min(8.5, 0.38 * pitch);
    const at = one.at[frame - 1], phase = one.phases[frame - 1], states = one.states[frame - 1] ?? "";
    const done = new Set(one.at.slice(0, frame).filter((_, i) => one.phases[i] === "b"));
    const parts = [];
    const inputs = one.inputs[frame - 1] ?? [];
    for (const [to, from] of data.chain) {
      const now = to === at && phase !== "b" && inputs.includes(from) ? " now" : "";
      parts.push(`<path class="edge${now}" d="M${fixed(x(from) + r)} ${forward}H${fixed(x(to) - r)}"/>`);
      const back = from === at && phase === "b" ? " now" : "";
      parts.push(`<path class="edge${back}" d="M${fixed(x(to) - r)} ${backward}H${fixed(x(from) + r)}"/>`);
    }
    for (const [reader, read] of data.reads) {
      const now = reader === at && phase === "b" && inputs.includes(read) ? " now" : "";
      parts.push(`<path class="edge${now}" d="M${fixed(x(read))} ${forward + r}L${fixed(x(reader))} ${backward - r}"/>`);
    }
    data.columns.forEach((_, column) => {
      const state = states[column] ?? ".", color = COLORS[NODES[state]], place = `cx="${fixed(x(column))}" cy="${forward}"`;
      const empty = `empty${state === "d" ? " dropped" : state === "-" ? " freed" : ""}`;
      parts.push(color ? `<circle class="shape" fill="${color}" ${place} r="${fixed(r)}"/>` : `<circle class="${empty}" ${place} r="${fixed(r)}"/>`);
      if (state === "r") parts.push(`<circle class="dot" ${place} r="${fixed(0.35 * r)}"/>`);
      const box = `x="${fixed(x(column) - r)}" y="${fixed(backward - r)}" width="${fixed(2 * r)}" height="${fixed(2 * r)}"`;
      parts.push(done.has(column) ? `<rect class="shape" fill="${COLORS.gradients}" ${box}/>` : `<rect class="empty" ${box}/>`);
      if (column === at) {
        const y = phase === "b" ? backward : forward;
        parts.push(phase === "b"
          ? `<rect class="ring" x="${fixed(x(at) - r - 3)}" y="${fixed(y - r - 3)}" width="${fixed(2 * r + 6)}" height="${fixed(2 * r + 6)}"/>`
          : `<circle class="ring" cx="${fixed(x(at))}" cy="${y}" r="${fixed(r + 3)}"/>`);
      }
    });
    parts.push(`<text x="${left}" y="14">forward →</text><text x="${fixed(width - left)}" y="142" text-anchor="end">← backward</text>`);
    parts.push(`<text x="${left}" y="142">layers 1 to ${data.columns.at(-1).layer}</text>`);
    paint(graph, width, 150, parts);
    memory(plot, width, {
      categories: data.categories, live: data.categories.map((name) => one.live[name]), frame, peak: one.peak_bytes,
      highest: 1.05 * data.baseline.peak_bytes, reference: data.baseline.peak_bytes, referenceName: "baseline", boundary: one.phases.indexOf("g"),
      ends: [[one.phases.indexOf("g"), "middle", "backward begins"]], colors: COLORS, xTitle: "operations, in order",
    });
  };

  const show = (frame) => {
    const one = variant();
    draw(one, frame);
    if (!frame) return "Before the step: nothing is live.";
    const phase = one.phases[frame - 1], column = data.columns[one.at[frame - 1]];
    const what = phase === "g" ? "The gradient of the output arrives" : `${PHASES[phase]} of ${column.name} in layer ${column.layer}`;
    return `${what}: ${mib(total(one, frame - 1))} live.`;
  };
  const widget = player(root, controls, {
    frames: () => variant().phases.length,
    still: () => {
      const one = variant(), sizes = [...one.phases].map((_, i) => total(one, i));
      return sizes.indexOf(one.peak_bytes) + 1;
    },
    seconds: 14,
    show,
  });
  const numbers = element("dl", root);
  const legend = element("ul", root, "", { class: "legend" });
  const round = (name) => ({ class: "key round", style: `background:${COLORS[name]}` });
  key(legend, "saved activation, or the output", round("activations"));
  key(legend, "recomputed activation", round("recomputed"));
  key(legend, "dropped", { class: "key empty dashed" });
  key(legend, "live for a moment", round("temporaries"));
  key(legend, "gradient", { style: `background:${COLORS.gradients}` });
  const chosen = () => {
    const one = (current = data.variants[choice?.selectedIndex ?? 0]);
    about.textContent = `${one.label}: ${one.about}`;
    const share = one.peak_bytes / data.baseline.peak_bytes;
    facts(numbers, [
      ["peak", mib(one.peak_bytes) + (share < 1 ? `, ${percent(share, 0)} of the baseline's` : "")],
      ["saved for backward", mib(one.saved_bytes)],
      ["recomputed operations", [...one.phases].filter((phase) => phase === "r").length],
      ["recomputed FLOPs", one.recompute_flops ? `${percent(one.recompute_flops / data.baseline.flops, 0)} of the baseline's` : "none"],
    ]);
    widget.rest();
  };
  choice?.addEventListener("change", chosen);
  chosen();
};

const buildStack = (root, data) => {
  const controls = element("div", root, "", { class: "controls" });
  const svg = canvas(root);
  const all = data.layers.reduce((sum, layer) => sum + layer.elements, 0);
  const present = (frame) => {
    const live = new Set();
    for (const [kind, layer] of data.frames.slice(0, frame)) kind === "save" ? live.add(layer) : live.delete(layer);
    return live;
  };
  const draw = (frame) => {
    const width = inner(root), row = 21, top = 24, height = row * data.layers.length, bar = Math.max(60, Math.min(180, 0.22 * width));
    const left = 4, text = left + bar + 34, live = present(frame), now = frame ? data.frames[frame - 1][1] : -1;
    const parts = [], texts = [];
    let below = top + height;
    data.layers.forEach((layer, i) => {
      const size = (height * layer.elements) / all, middle = top + height - (i + 0.5) * row;
      const is = live.has(i);
      const look = is ? `class="shape" fill="${COLORS[layer.category]}"` : 'class="empty freed"';
      parts.push(`<rect ${look} x="${left}" y="${fixed(below - size)}" width="${fixed(bar)}" height="${fixed(Math.max(size, 0.5))}"/>`);
      parts.push(`<path class="edge${i === now ? " now" : ""}" d="M${fixed(left + bar)} ${fixed(below - size / 2)}L${fixed(text - 6)} ${fixed(middle)}"/>`);
      texts.push([middle + 4, layer, is, i === now]);
      below -= size;
    });
    paint(svg, width, top + height + 6, parts);
    const elements = [...live].reduce((sum, i) => sum + data.layers[i].elements, 0);
    label(svg, left, 14, `${elements.toLocaleString("en-GB")} elements per token`, "start", "strong");
    for (const [y, layer, is, strong] of texts) {
      const look = strong ? "strong" : is ? "live" : "";
      label(svg, text, y, layer.label, "start", look);
      label(svg, width - 4, y, layer.symbol === String(layer.elements) ? layer.symbol : `${layer.symbol} = ${layer.elements}`, "end", look);
    }
  };
  const still = () => data.frames.filter(([kind]) => kind === "save").length;
  const widget = player(root, controls, {
    frames: () => data.frames.length,
    still,
    seconds: 16,
    show: (frame) => {
      draw(frame);
      if (!frame) return "Before the block: nothing is saved for it.";
      const [kind, i] = data.frames[frame - 1], bytes = [...present(frame)].reduce((sum, one) => sum + data.layers[one].bytes, 0);
      const what = kind === "save" ? `Forward saves: ${data.layers[i].label}` : `Backward has used: ${data.layers[i].label}`;
      return `${what}. ${mib(bytes)} for ${data.tokens.toLocaleString("en-GB")} tokens.`;
    },
  });
  const legend = element("ul", root, "", { class: "legend" });
  key(legend, "saved activation", { style: `background:${COLORS.activations}` });
  key(legend, "input of the block, which its caller holds", { style: `background:${COLORS.inputs}` });
  widget.rest();
};

const LANE_COLORS = { f: COLORS.parameters, r: COLORS.recomputed, b: COLORS.gradients, out: "#2b7d6a", in: COLORS.optimizer };

const buildLanes = (root, data, id) => {
  const controls = element("div", root, "", { class: "controls" });
  const choice = select(controls, data.variants, id, root.dataset.start);
  const about = element("p", root, "", { class: "about" });
  const lanes = canvas(root), plot = canvas(root);
  let current = data.variants[0];
  const variant = () => current;
  const ms = (seconds) => `${(1000 * seconds).toFixed(2)} ms`;

  const draw = (one, frame) => {
    const width = inner(root), left = 48, right = width - 4, now = (one.seconds * frame) / one.device.length;
    const x = (seconds) => left + ((right - left) * seconds) / one.seconds;
    const parts = [], numbers = [];
    const bars = (works, y, height) => {
      for (const [what, block, start, end] of works) {
        const until = Math.min(end, Math.max(start, now)), rect = (from, to, name) =>
          to > from ? `<rect${name} fill="${LANE_COLORS[what]}" x="${fixed(x(from))}" y="${y}" width="${Math.max(0.6, x(to) - x(from)).toFixed(2)}" height="${height}"/>` : "";
        parts.push(rect(start, until, ""), rect(until, end, ' class="still"'));
        if (block && x(end) - x(start) > 17 && start <= now) numbers.push(`<text class="${what === "b" ? "on-pink" : "on-color"}" x="${fixed((x(start) + x(end)) / 2)}" y="${y + height / 2 + 4}" text-anchor="middle">${block}</text>`);
      }
    };
    bars(one.compute, 20, 34);
    for (const [start, end] of one.waits) {
      if (start <= now) parts.push(`<rect class="wait" x="${fixed(x(start))}" y="34" width="${Math.max(0.6, x(Math.min(end, now)) - x(start)).toFixed(2)}" height="6"/>`);
    }
    bars(one.copies, 74, 22);
    parts.push(`<text x="${left}" y="14">compute, by block</text><text x="${left}" y="68">copies, by block</text>`);
    parts.push(`<path class="now-line" d="M${fixed(x(now))} 18V98"/>`);
    paint(lanes, width, 104, [...parts, ...numbers]);
    memory(plot, width, {
      categories: ["device"], live: [one.device], line: one.host,
      highest: 1.05 * Math.max(data.without.peak_bytes, one.peak_bytes, one.host_bytes), frame, peak: one.peak_bytes,
      reference: data.without.peak_bytes, referenceName: width < 480 ? "without" : "without offload", colors: { device: "#8b8d98" },
      xTitle: "time of one step",
      ends: [[0, "start", "0"], [one.device.length, "end", ms(one.seconds)]],
    });
  };
  const widget = player(root, controls, {
    frames: () => variant().device.length,
    still: () => variant().device.length,
    seconds: 12,
    show: (frame) => {
      const one = variant(), now = (one.seconds * frame) / one.device.length, bucket = Math.max(0, frame - 1);
      draw(one, frame);
      return `${ms(now)}: ${mib(one.device[bucket])} on the device, ${mib(one.host[bucket])} in host memory.`;
    },
  });
  const numbers = element("dl", root);
  const legend = element("ul", root, "", { class: "legend" });
  const color = (name) => ({ style: `background:${LANE_COLORS[name]}` });
  key(legend, "forward", color("f"));
  key(legend, "recomputation", color("r"));
  key(legend, "backward", color("b"));
  key(legend, "copy out", color("out"));
  key(legend, "copy in", color("in"));
  key(legend, "compute waits", { class: "key wait" });
  key(legend, "device memory", { style: "background:#8b8d98" });
  key(legend, "host memory", { class: "key rule" });
  const chosen = () => {
    const one = (current = data.variants[choice.selectedIndex]);
    about.textContent = `${one.label}: ${one.about}`;
    facts(numbers, [
      ["peak on the device", `${mib(one.peak_bytes)}, without offload ${mib(data.without.peak_bytes)}`],
      ["host memory", mib(one.host_bytes)],
      ["time of the step", ms(one.seconds)],
      ["waiting for copies", ms(one.exposed_seconds)],
    ]);
    widget.rest();
  };
  choice.addEventListener("change", chosen);
  chosen();
};

const BUILDERS = { graph: buildGraph, stack: buildStack, lanes: buildLanes };
const build = (root, data) => {
  if (root.childElementCount) return; // built by the script of another schematic on this page
  const place = [...document.querySelectorAll(".schematic-explorer")].indexOf(root);
  BUILDERS[data.kind](root, data, `schematic-explorer-${place}`);
};

start("schematic-explorer", build);
