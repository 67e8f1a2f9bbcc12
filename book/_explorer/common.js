// What the explorers share; each page holds it before the explorer's own script, in one function.
const COLORS = {
  parameters: "#4a6fc4", buffers: "#8fa8dd", inputs: "#55b3d9", optimizer: "#8e5cc4",
  gradients: "#d1568f", activations: "#eb9a2d", recomputed: "#a8552a", temporaries: "#2fa58c",
};
const MIB = 2 ** 20;
const mib = (bytes) => `${(bytes / MIB).toFixed(bytes < 10 * MIB ? 2 : 1)} MiB`;
const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;

const element = (tag, parent, text = "", attributes = {}) => {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  parent.append(made);
  return made;
};

const key = (legend, label, attributes) => {
  const item = element("li", legend);
  element("span", item, "", { class: "key", ...attributes });
  item.append(label);
};

const drawing = (parent, title) => {
  element("h4", parent, title);
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 400 230");
  svg.setAttribute("role", "img");
  parent.append(svg);
  return svg;
};

// Only numbers and fixed words go into the markup.
const LEFT = 46, RIGHT = 392, TOP = 12, BOTTOM = 192;
const frame = (x, y, xTitle, yTitle) => {
  const parts = [`<path class="axis" fill="none" d="M${LEFT} ${TOP}V${BOTTOM}H${RIGHT}"/>`];
  for (const [at, label] of x) parts.push(`<text x="${at}" y="${BOTTOM + 14}" text-anchor="middle">${label}</text>`);
  for (const [at, label] of y) parts.push(`<text x="${LEFT - 5}" y="${at + 4}" text-anchor="end">${label}</text>`);
  parts.push(`<text x="${(LEFT + RIGHT) / 2}" y="${BOTTOM + 32}" text-anchor="middle">${xTitle}</text>`);
  parts.push(`<text transform="translate(11 ${(TOP + BOTTOM) / 2}) rotate(-90)" text-anchor="middle">${yTitle}</text>`);
  return parts.join("");
};

const steps = (highest, count) => {
  const rough = highest / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  return Array.from({ length: Math.floor(highest / step) + 1 }, (_, i) => i * step);
};

// A bar of parts, [color, bytes] each, from the bottom to the top: its markup, and its bytes in all.
const stacked = (parts, left, wide, y) => {
  let bytes = 0;
  const markup = parts.map(([color, size]) => {
    const top = y(bytes + size), height = y(bytes) - top;
    bytes += size;
    return `<rect fill="${color}" x="${left.toFixed(1)}" y="${top.toFixed(1)}" width="${wide.toFixed(1)}" height="${height.toFixed(1)}"/>`;
  });
  return { markup: markup.join(""), bytes };
};

// The names below bars of equal width; they are text of the data, so no markup.
const nameBars = (svg, names, chosen) => names.forEach((name, place) => {
  const label = document.createElementNS("http://www.w3.org/2000/svg", "text");
  label.setAttribute("x", LEFT + (place + 0.5) * (RIGHT - LEFT) / names.length);
  label.setAttribute("y", BOTTOM + 14);
  label.setAttribute("text-anchor", "middle");
  if (place === chosen) label.setAttribute("class", "chosen-name");
  label.textContent = name;
  svg.append(label);
});

// One after the other, each with the data that follow it.
const start = (name, build) => {
  const sources = document.querySelectorAll(`.${name}-data`);
  document.querySelectorAll(`.${name}`).forEach((root, index) => build(root, JSON.parse(sources[index].textContent)));
};
