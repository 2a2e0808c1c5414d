/** Elements of the page. Texts are only ever set as text. */

/**
 * Return an element of the page, which must exist.
 * @template {HTMLElement} T
 * @param {string} id
 * @param {new () => T} type
 * @returns {T}
 */
export function byId(id, type) {
  const found = document.getElementById(id);
  if (!(found instanceof type)) throw new Error(`the page has no element ${id}`);
  return found;
}

/**
 * Make an element.
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} name
 * @param {{text?: string, className?: string, label?: string}} [facts]
 * @param {...Node} children
 * @returns {HTMLElementTagNameMap[K]}
 */
export function make(name, { text, className, label } = {}, ...children) {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  if (label) element.setAttribute("aria-label", label);
  element.append(...children);
  return element;
}

/**
 * Set the text of an element, if it differs: readers of the screen hear each change.
 * @param {Element} element
 * @param {string} text
 */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Give a container one child for each key, in this order. Children keep their identity, so the
 * focus stays where it is.
 * @template Row
 * @template {Element} Child
 * @param {Element} container
 * @param {Iterable<[string, Row]>} rows
 * @param {(row: Row) => Child} create
 * @param {(child: Child, row: Row) => void} update
 */
export function reconcile(container, rows, create, update) {
  const wanted = new Map(rows);
  /** @type {Map<string, Child>} */
  const known = new Map();
  // Rows that go are removed first: a row that moves would lose the focus.
  for (const child of [...container.children]) {
    const key = child.getAttribute("data-key") ?? "";
    if (wanted.has(key)) known.set(key, /** @type {Child} */ (child));
    else removeWithFocus(child, container);
  }
  let next = container.firstElementChild;
  for (const [key, row] of wanted) {
    let child = known.get(key);
    if (!child) {
      child = create(row);
      child.setAttribute("data-key", key);
    }
    update(child, row);
    if (child === next) next = next.nextElementSibling;
    else container.insertBefore(child, next);
  }
}

/**
 * Remove a row. If it has the focus, a row beside it gets the focus, or what holds the rows.
 * @param {Element} row
 * @param {Element} container
 */
function removeWithFocus(row, container) {
  const hasFocus = row.contains(document.activeElement);
  const beside = row.nextElementSibling ?? row.previousElementSibling;
  row.remove();
  if (!hasFocus) return;
  const heir = beside?.querySelector("button") ?? container.closest("[tabindex]");
  if (heir instanceof HTMLElement) heir.focus();
}

/**
 * Make a button that acts unless it is disabled. A disabled one keeps the focus.
 * @param {{text: string, label: string, className?: string}} facts
 * @param {() => void} act
 */
export function makeButton(facts, act) {
  const button = make("button", facts);
  button.type = "button";
  button.addEventListener("click", () => {
    if (button.getAttribute("aria-disabled") !== "true") act();
  });
  return button;
}

/** @param {Element} button @param {boolean} isDisabled */
export function setDisabled(button, isDisabled) {
  button.setAttribute("aria-disabled", String(isDisabled));
}

/** @type {Promise<boolean>} */
let lastAnswer = Promise.resolve(false);

/**
 * Ask in a dialog that names the effect. Cancel has the focus. There is one dialog, so a question
 * waits until the one before it is answered.
 * @param {{title: string, text: string, yes: string}} question
 * @returns {Promise<boolean>}
 */
export function confirmed(question) {
  lastAnswer = lastAnswer.then(() => ask(question));
  return lastAnswer;
}

/** @param {{title: string, text: string, yes: string}} question @returns {Promise<boolean>} */
function ask({ title, text, yes }) {
  const dialog = byId("confirm", HTMLDialogElement);
  byId("confirm-title", HTMLElement).textContent = title;
  byId("confirm-text", HTMLElement).textContent = text;
  byId("confirm-yes", HTMLElement).textContent = yes;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}
