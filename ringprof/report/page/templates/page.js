"use strict";
// Click a heading to sort by its column, again to turn the order round. Figures sort by value, dashes last.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement;
    const table = head.closest("table");
    const column = [...head.parentElement.children].indexOf(head);
    const numeric = head.classList.contains("number");
    const before = head.getAttribute("aria-sort");
    const falling = before === null ? numeric : before === "ascending";
    for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", falling ? "descending" : "ascending");
    const key = (row) => row.children[column].dataset.key;
    const value = (row) => (key(row) === "-inf" ? -Infinity : Number(key(row)));
    const order = numeric
      ? (a, b) => (value(a) === value(b) ? 0 : value(a) - value(b))
      : (a, b) => key(a).localeCompare(key(b), undefined, { numeric: true });
    const rows = [...table.tBodies[0].rows].sort((a, b) => (falling ? order(b, a) : order(a, b)));
    table.tBodies[0].append(...rows);
  });
}
