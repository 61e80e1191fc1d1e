"use strict";
// Clicking a heading sorts the table by its column; clicking again reverses the order. Numbers sort by value; dashes are
// below all numbers.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const heading = button.parentElement;
    const table = heading.closest("table");
    const column = [...heading.parentElement.children].indexOf(heading);
    const numeric = heading.classList.contains("number");
    const previousOrder = heading.getAttribute("aria-sort");
    const descending = previousOrder === null ? numeric : previousOrder === "ascending";
    for (const other of heading.parentElement.children) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const key = (row) => row.children[column].dataset.key;
    const value = (row) => (key(row) === "-inf" ? -Infinity : Number(key(row)));
    const order = numeric
      ? (a, b) => (value(a) === value(b) ? 0 : value(a) - value(b))
      : (a, b) => key(a).localeCompare(key(b), undefined, { numeric: true });
    const rows = [...table.tBodies[0].rows].sort((a, b) => (descending ? order(b, a) : order(a, b)));
    table.tBodies[0].append(...rows);
  });
}
// Save a table in its current order, with cells as displayed. A cell that a spreadsheet would run as a formula gets an
// apostrophe in front.
for (const button of document.querySelectorAll(".below button")) {
  button.addEventListener("click", () => {
    const scroll = button.closest(".below").previousElementSibling;
    const cell = (element) => {
      const text = element.innerText.trim();
      const plain = element.classList.contains("number") ? text.replace(/,/g, "") : text.replace(/^[=+\-@]/, "'$&");
      return /[",\n]/.test(plain) ? '"' + plain.replace(/"/g, '""') + '"' : plain;
    };
    const lines = [...scroll.querySelectorAll("tr")].map((row) => [...row.cells].map(cell).join(","));
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([lines.join("\n") + "\n"], { type: "text/csv" }));
    link.download = (scroll.closest("section").id || "table") + ".csv";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
}
