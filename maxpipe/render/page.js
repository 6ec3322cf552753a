const tip = document.getElementById("tip");
const show = (event, text) => {
  tip.textContent = text;
  tip.style.display = "block";
  const right = event.clientX + 14 + tip.offsetWidth > innerWidth;
  tip.style.left = (right ? event.clientX - 14 - tip.offsetWidth : event.clientX + 14) + "px";
  tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
};
