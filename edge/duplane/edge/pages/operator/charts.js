/** Small charts of the last minutes, drawn as SVG. */

import { make, setText } from "./elements.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300;
const HEIGHT = 80;
const SPAN_S = 600;
const STEP_S = 2;

/**
 * @typedef {import("./model.js").Sample} Sample
 * @typedef {{name: string, className: string, value: (sample: Sample) => number | null | undefined}} Line
 */

/** One chart: a figure with a title, lines, and a sentence with the latest values. */
export class Chart {
  /**
   * @param {string} title
   * @param {readonly Line[]} lines
   * @param {{unit: string, leastTop: number, marks?: (sample: Sample) => number, note?: string}} scale
   */
  constructor(title, lines, { unit, leastTop, marks, note = "" }) {
    this._lines = lines;
    this._unit = unit;
    this._leastTop = leastTop;
    this._marks = marks;
    this._note = note;
    this._svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true", focusable: "false" });
    this._paths = lines.map((line) => shape("path", { class: line.className }));
    this._late = shape("path", { class: "late" });
    this._svg.append(...this._paths, this._late);
    this._top = make("span", { className: "top" });
    this._summary = make("figcaption");
    this.element = make("figure", {}, make("h3", { text: title }), this._top, this._svg, this._summary);
  }

  /** @param {readonly Sample[]} samples @param {number} now */
  render(samples, now) {
    const values = this._lines.map((line) => samples.map((sample) => line.value(sample) ?? null));
    const top = niceTop(Math.max(this._leastTop, ...values.flat().map((value) => value ?? 0)));
    setText(this._top, `${top}${this._unit}`);
    this._paths.forEach((path, index) => {
      path.setAttribute("d", linePath(samples, values[index] ?? [], now, top));
    });
    const marks = this._marks;
    const marked = marks ? samples.filter((sample) => marks(sample) > 0) : [];
    this._late.setAttribute("d", marked.map((sample) => `M${place(sample.at_s, now)} ${HEIGHT}v-12`).join(""));
    setText(this._summary, this._sentence(values));
  }

  /** @param {readonly (number | null)[][]} values */
  _sentence(values) {
    const latest = this._lines.map((line, index) => {
      const known = (values[index] ?? []).filter((value) => value !== null);
      return known.length ? `${line.name} ${known.at(-1)}${this._unit}` : `${line.name} unknown`;
    });
    return latest.join(", ") + this._note;
  }
}

/**
 * Return the path of a line. Steps without a value are gaps.
 * @param {readonly Sample[]} samples
 * @param {readonly (number | null)[]} values
 * @param {number} now
 * @param {number} top
 */
export function linePath(samples, values, now, top) {
  let path = "";
  let lastAtS = -Infinity;
  samples.forEach((sample, index) => {
    const value = values[index];
    if (value === null || value === undefined || sample.at_s < now - SPAN_S) return;
    const isGap = sample.at_s - lastAtS > 2 * STEP_S;
    const y = HEIGHT - (value / top) * (HEIGHT - 2) - 1;
    const x = place(sample.at_s, now);
    path += `${isGap ? `M${x} ${y.toFixed(1)}h0.1` : ""}L${x} ${y.toFixed(1)}`;
    lastAtS = sample.at_s;
  });
  return path;
}

/** @param {number} atS @param {number} now */
function place(atS, now) {
  return (WIDTH * (1 - Math.min(SPAN_S, Math.max(0, now - atS)) / SPAN_S)).toFixed(1);
}

/**
 * Return the least of 1, 2, 5, 10, 20, … that is not below a value.
 * @param {number} value
 */
export function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, value)));
  for (const factor of [1, 2, 5]) if (factor * power >= value) return factor * power;
  return 10 * power;
}

/** @param {string} name @param {Record<string, string>} attributes */
function shape(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}
