// Text of unknown origin, made visible; and elements, made of text alone: nothing here or elsewhere parses markup.

// Control characters, what turns the direction of writing, what has no width, line separators, tags, half surrogates.
// What emoji and scripts are made with stays: U+200C, U+200D, U+FE0F.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb\u{e0000}-\u{e007f}\p{Surrogate}]/gu;

function visible(text) {
  return text.replace(HIDDEN, (character) => {
    const code = character.codePointAt(0);
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    if (code === 0x7f) return "\u2421";
    return "\u27e8U+" + code.toString(16).toUpperCase().padStart(4, "0") + "\u27e9";
  });
}

// The beginning of a text, not cut inside a surrogate pair.
function beginning(text, size) {
  if (text.length <= size) return text;
  const last = text.charCodeAt(size - 1);
  return text.slice(0, last >= 0xd800 && last < 0xdc00 ? size - 1 : size);
}

// Four significant digits; a dash for what is not there.
function shown(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "\u2013";
  if (!Number.isFinite(value)) return value > 0 ? "\u221e" : "\u2212\u221e";
  const small = value !== 0 && Math.abs(value) < 1e-3;
  const [digits, power] = (small ? value.toExponential(3) : value.toPrecision(4)).split("e");
  return (Number(digits) + (power === undefined ? "" : `e${Number(power)}`)).replaceAll("-", "\u2212");
}

function count(number) {
  return number.toLocaleString("en-GB");
}

function element(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "text") made.textContent = value;
    else if (name === "class") made.className = value;
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// A name and values as a line of a table.
function line(name, values, kind = "") {
  const head = element("th", { scope: "row" }, element("bdi", { text: visible(name) }));
  return element("tr", { class: kind }, head, ...[values].flat().map((text) => element("td", { class: "n", text })));
}

// A property that is the object's own: a reward may be called "constructor".
const own = (object, name) => (Object.hasOwn(object, name) ? object[name] : undefined);

const at = (id) => document.getElementById(id);
