"""Draw a clothed person: a 3D skeleton, projected for a yaw and pitch and filled with flat shapes."""

import math
from collections.abc import Iterable

import numpy as np
from PIL import Image, ImageDraw

from fastamp.demo.pattern import accent_mask
from fastamp.demo.pose import Pose
from fastamp.demo.wardrobe import Appearance, Color

Point = tuple[float, float, float]

# Downward angle of the camera, in radians, from which the crown and the shoulders are painted as seen from above.
_FROM_ABOVE = 0.6
# Heights of the joints above the ground, in body heights.
_SHOULDER, _HIP, _CHIN = 0.815, 0.525, 0.868
_THIGH, _SHIN = 0.25, 0.235
_UPPER_ARM, _FOREARM = 0.165, 0.15
_HEAD_CENTER = 0.932


def _point(coordinates: Iterable[float]) -> Point:
    x, y, z = coordinates
    return x, y, z


def draw_person(canvas: Image.Image, person: Appearance, pose: Pose, foot: tuple[float, float], height: float) -> None:
    """Paint a person onto a canvas.

    Args:
        canvas: RGBA image with straight alpha, modified in place; unchanged outside of the person.
        person: appearance of the person.
        pose: pose of the person.
        foot: pixel (x, y) of the ground point between the feet.
        height: pixels from sole to crown for a person of height 1.
    """
    _Figure(canvas, person, pose, foot, height).paint()


class _Figure:
    """Painter of one person: projects body points to pixels, and paints body parts from far to near.

    Body axes, in body heights: x to the side, y up from the ground, z forward. In camera coordinates, ``x cos(yaw) + z
    sin(yaw)`` points right and ``z cos(yaw) - x sin(yaw)`` points towards the camera.
    """

    def __init__(
        self, canvas: Image.Image, person: Appearance, pose: Pose, foot: tuple[float, float], height: float
    ) -> None:
        self.canvas = canvas
        self.brush = ImageDraw.Draw(canvas)
        self.person = person
        self.pose = pose
        self.foot_x, self.foot_y = foot
        self.unit = height * person.height
        self.cos, self.sin = math.cos(pose.yaw), math.sin(pose.yaw)
        self.pitch_cos, self.pitch_sin = math.cos(pose.pitch), math.sin(pose.pitch)
        self.breadth = person.breadth
        self.lift = 0.0
        self.legs = {side: self._leg_joints(side) for side in (-1, 1)}
        self.lift = -min(ankle[1] for _, _, ankle in self.legs.values()) + 0.035
        self.legs = {side: self._leg_joints(side) for side in (-1, 1)}

    def paint(self) -> None:
        """Paint the body, clothes and bags, from far to near."""
        near = -1 if self.sin > 0 else 1
        facing = self.cos > 0
        sideways = abs(self.sin) > 0.35
        if facing:
            self._backpack()
            self._hair_behind()
        if sideways:
            self._arm(-near, 0.78)
        self._leg(-near, 0.8 if sideways else 0.92)
        self._leg(near, 1.0)
        self._skirt()
        self._torso()
        self._straps()
        if not sideways:
            self._arm(-near, 1.0)
        self._head()
        if not facing:
            self._hair_behind()
            self._backpack()
        self._arm(near, 1.0)

    # -- projection and primitives -------------------------------------------------------------------------------

    def _at(self, x: float, y: float, z: float) -> tuple[float, float]:
        """Project a body point to a pixel."""
        right = x * self.cos + z * self.sin
        towards = z * self.cos - x * self.sin
        up = y * self.pitch_cos - towards * self.pitch_sin
        return self.foot_x + right * self.unit, self.foot_y - up * self.unit

    def _half_width(self, breadth: float, depth: float) -> float:
        """Return half the projected width of an ellipse with the given semi-axes, in body heights."""
        return math.hypot(breadth * self.cos, depth * self.sin)

    def _limb(self, start: Point, end: Point, start_width: float, end_width: float, color: Color) -> None:
        """Paint a capsule between two body points; widths are radii in body heights."""
        (x0, y0), (x1, y1) = self._at(*start), self._at(*end)
        r0, r1 = start_width * self.unit, end_width * self.unit
        length = math.hypot(x1 - x0, y1 - y0) or 1.0
        nx, ny = (y1 - y0) / length, (x0 - x1) / length
        corners = [
            (x0 + nx * r0, y0 + ny * r0),
            (x1 + nx * r1, y1 + ny * r1),
            (x1 - nx * r1, y1 - ny * r1),
            (x0 - nx * r0, y0 - ny * r0),
        ]
        self.brush.polygon(corners, fill=color)
        self.brush.ellipse((x0 - r0, y0 - r0, x0 + r0, y0 + r0), fill=color)
        self.brush.ellipse((x1 - r1, y1 - r1, x1 + r1, y1 + r1), fill=color)

    def _oval(self, center: tuple[float, float], rx: float, ry: float, color: Color) -> None:
        """Paint an ellipse around a pixel; radii in body heights."""
        x, y = center
        self.brush.ellipse((x - rx * self.unit, y - ry * self.unit, x + rx * self.unit, y + ry * self.unit), fill=color)

    def _box(self, center: tuple[float, float], rx: float, ry: float, color: Color, round_by: float) -> None:
        """Paint a rounded rectangle around a pixel; sizes in body heights."""
        x, y = center
        self.brush.rounded_rectangle(
            (x - rx * self.unit, y - ry * self.unit, x + rx * self.unit, y + ry * self.unit),
            radius=round_by * self.unit,
            fill=color,
        )

    # -- legs ----------------------------------------------------------------------------------------------------

    def _leg_joints(self, side: int) -> tuple[Point, Point, Point]:
        """Return hip, knee and ankle of a leg; the trailing leg bends at the knee."""
        swing = self.pose.stride * side
        bend = self.pose.knee if swing < 0 else 0.06
        hip_x = 0.047 * self.breadth * side
        hip = (hip_x, _HIP + self.lift, 0.0)
        knee = (hip_x, hip[1] - _THIGH * math.cos(swing), _THIGH * math.sin(swing))
        ankle = (hip_x * 0.9, knee[1] - _SHIN * math.cos(swing - bend), knee[2] + _SHIN * math.sin(swing - bend))
        return hip, knee, ankle

    def _leg(self, side: int, light: float) -> None:
        person, breadth = self.person, 0.45 + 0.55 * self.breadth
        hip, knee, ankle = self.legs[side]
        skin = _shade(person.skin, light)
        cloth = _shade(person.lower_color, light)
        self._shoe(ankle, light)
        if person.lower in ("trousers", "side_stripe"):
            self._limb(knee, ankle, 0.038 * breadth, 0.029, cloth)
            self._limb(hip, knee, 0.055 * breadth, 0.039 * breadth, cloth)
            if person.lower == "side_stripe":
                self._side_stripe(side, hip, knee, ankle, light)
        else:
            self._limb(knee, ankle, 0.028 * breadth, 0.018, skin)
            self._limb(hip, knee, 0.046 * breadth, 0.03 * breadth, skin)
        if person.lower == "shorts":
            hem = _point(0.12 * a + 0.88 * b for a, b in zip(hip, knee, strict=True))
            self._limb(hip, hem, 0.056 * breadth, 0.05 * breadth, cloth)
        if person.shoe == "boot":
            top = _point(0.62 * a + 0.38 * b for a, b in zip(ankle, knee, strict=True))
            self._limb(top, ankle, 0.033, 0.028, _shade(person.shoe_color, light))

    def _side_stripe(self, side: int, hip: Point, knee: Point, ankle: Point, light: float) -> None:
        """Paint the stripe along the outer seam if it faces the camera."""
        if -side * self.sin < -0.45:
            return
        offset = 0.03 * side
        stripe = _shade(self.person.accent, light)
        for start, end in ((hip, knee), (knee, ankle)):
            self._limb((start[0] + offset, *start[1:]), (end[0] + offset * 0.8, *end[1:]), 0.012, 0.011, stripe)

    def _shoe(self, ankle: Point, light: float) -> None:
        color = _shade(self.person.shoe_color, light)
        heel = (ankle[0], ankle[1] - 0.018, ankle[2] - 0.012)
        toe = (ankle[0] * 1.15, ankle[1] - 0.022, ankle[2] + 0.065)
        self._limb(heel, toe, 0.022, 0.017, color)
        self._limb(ankle, heel, 0.022, 0.02, color)

    def _skirt(self) -> None:
        lengths = {"skirt": 0.34, "long_skirt": 0.13}
        if self.person.lower not in lengths:
            return
        hem = lengths[self.person.lower]
        flare = 0.115 if self.person.lower == "skirt" else 0.125
        top, bottom = self._half_width(0.09 * self.breadth, 0.07), self._half_width(flare * self.breadth, flare)
        _, y0 = self._at(0, 0.56, 0)
        _, y1 = self._at(0, hem, 0)
        x, unit = self.foot_x, self.unit
        self.brush.polygon(
            [(x - top * unit, y0), (x + top * unit, y0), (x + bottom * unit, y1), (x - bottom * unit, y1)],
            fill=self.person.lower_color,
        )
        self._oval((x, y1), bottom, 0.02, self.person.lower_color)
        for fold in (-0.5, 0.1, 0.6):
            line = [(x + fold * top * unit, y0), (x + fold * bottom * unit, y1)]
            self.brush.line(line, fill=_shade(self.person.lower_color, 0.8), width=max(1, round(0.008 * unit)))

    # -- torso ---------------------------------------------------------------------------------------------------

    def _torso(self) -> None:
        """Paint the upper garment: a silhouette filled with its pattern, wrapped around the body."""
        person, unit = self.person, self.unit
        hem = person.upper_hem
        profile = (
            (0.848, 0.03, 0.03),
            (0.828, 0.085, 0.05),
            (0.805, 0.108, 0.06),
            (0.74, 0.108, 0.075),
            (0.62, 0.098, 0.07),
            (0.52, 0.102, 0.074),
            (hem, 0.102 if hem > 0.4 else 0.118, 0.078 if hem > 0.4 else 0.095),
        )
        widths = [self._half_width(x * self.breadth, z * (0.4 + 0.6 * self.breadth)) * unit for _, x, z in profile]
        heights = [self._at(0, y + self.lift * 0.5, 0)[1] for y, _, _ in profile]
        reach = max(widths)
        left, top = math.floor(self.foot_x - reach), math.floor(heights[0])
        size = (math.ceil(2 * reach) + 2, math.ceil(heights[-1] - heights[0]) + 2)
        outline = [(self.foot_x - w - left, y - top) for w, y in zip(widths, heights, strict=True)]
        outline += [(self.foot_x + w - left, y - top) for w, y in zip(widths, heights, strict=True)][::-1]
        mask = Image.new("L", size)
        ImageDraw.Draw(mask).polygon(outline, fill=255)

        rows = (np.arange(size[1], dtype=np.float32) / size[1])[:, None] * (0.848 - hem) / (0.82 - 0.49)
        across = np.clip((np.arange(size[0]) + left - self.foot_x) / reach, -0.999, 0.999)
        azimuth = np.arcsin(across)[None, :] - self.pose.yaw
        azimuth = (azimuth + np.pi) % (2 * np.pi) - np.pi
        accented = np.broadcast_to(accent_mask(person.pattern, rows, azimuth), (size[1], size[0]))
        shade = 0.8 + 0.2 * np.cos(np.arcsin(across) - self.pose.light)
        palette = np.array([person.upper, person.accent], dtype=np.float32)
        cloth = palette[accented.astype(np.int64)] * shade[None, :, None]
        self.canvas.paste(Image.fromarray(cloth.astype(np.uint8)), (left, top), mask)
        if self.pose.pitch > _FROM_ABOVE:
            shoulders = self._half_width(0.112 * self.breadth, 0.07)
            fill = person.accent if person.sleeve_style == "contrast" and person.sleeve != "none" else person.upper
            self._oval(self._at(0, 0.815, 0), shoulders, 0.065 * self.pitch_sin, _shade(fill, 1.05))

    def _straps(self) -> None:
        """Paint the straps of a bag, and a cross-body bag."""
        person, unit = self.person, self.unit
        width = max(1, round(0.02 * unit))
        if "backpack" in person.bag and self.cos > 0.1:
            for side in (-1, 1):
                top, low = self._at(0.062 * side, 0.83, 0.03), self._at(0.07 * side, 0.66, 0.07)
                self.brush.line([top, low], fill=person.bag_color, width=width)
        if person.bag == "cross_body":
            depth = 0.06 if self.cos > 0 else -0.06
            if abs(self.cos) > 0.3:
                ends = [self._at(0.06, 0.835, 0.0), self._at(-0.1 * self.breadth, 0.54, depth)]
                self.brush.line(ends, fill=person.bag_color, width=width)
            if self.sin > -0.5:
                center = self._at(-0.115 * self.breadth, 0.5, 0.01)
                self._box(center, 0.045 + 0.025 * abs(self.sin), 0.05, person.bag_color, 0.012)
                self._box((center[0], center[1] - 0.022 * unit), 0.04, 0.008, _shade(person.bag_color, 0.7), 0.004)

    def _backpack(self) -> None:
        person = self.person
        if "backpack" not in person.bag:
            return
        large = person.bag == "big_backpack"
        depth = 0.075 if large else 0.055
        rx = self._half_width(0.105 if large else 0.08, depth)
        ry = 0.165 if large else 0.115
        center = self._at(0, 0.7 if large else 0.715, -(0.06 + depth))
        self._box(center, rx, ry, person.bag_color, 0.035)
        if self.cos < 0.2:
            pocket = (center[0], center[1] + ry * 0.42 * self.unit)
            self._box(pocket, rx * 0.75, ry * 0.4, _shade(person.bag_color, 0.72), 0.02)
            seam = center[1] - ry * 0.45 * self.unit
            ends = [(center[0] - rx * 0.8 * self.unit, seam), (center[0] + rx * 0.8 * self.unit, seam)]
            self.brush.line(ends, fill=_shade(person.bag_color, 0.6), width=max(1, round(0.008 * self.unit)))

    # -- arms ----------------------------------------------------------------------------------------------------

    def _arm(self, side: int, light: float) -> None:
        person, pose = self.person, self.pose
        swing = pose.arms * side
        elbow_bend = pose.elbows[0 if side < 0 else 1]
        holds = (person.bag == "handbag" and side < 0) or (person.bag == "carrier" and side > 0)
        if holds:
            swing, elbow_bend = swing * 0.4, 0.15
        x = 0.1 * self.breadth * side
        shoulder = (x, _SHOULDER - 0.022, 0.0)
        elbow = (x + 0.022 * side, shoulder[1] - _UPPER_ARM * math.cos(swing), _UPPER_ARM * math.sin(swing))
        angle = swing + elbow_bend
        inward = 0.02 * side * (1 - min(elbow_bend, 1.2))
        wrist = (elbow[0] + inward - 0.02 * side, elbow[1] - _FOREARM * math.cos(angle), elbow[2])
        wrist = (wrist[0], wrist[1], elbow[2] + _FOREARM * math.sin(angle))
        hand = _point(b + 0.2 * (b - a) for a, b in zip(elbow, wrist, strict=True))
        if holds:
            self._hand_bag(wrist)

        skin = _shade(person.skin, light * 0.96)
        thick = 0.4 + 0.6 * self.breadth
        self._limb(shoulder, elbow, 0.031 * thick, 0.026 * thick, skin)
        self._limb(elbow, wrist, 0.025 * thick, 0.019 * thick, skin)
        self._limb(wrist, hand, 0.019, 0.017, skin)
        if person.sleeve == "none":
            return
        contrast = person.sleeve_style == "contrast" or person.pattern == "side_panels"
        cloth = person.accent if contrast else person.upper
        cuff = _point(0.3 * a + 0.7 * b for a, b in zip(shoulder, elbow, strict=True))
        parts = [(shoulder, cuff, 0.036 * thick, 0.036 * thick)]
        if person.sleeve == "long":
            parts = [(shoulder, elbow, 0.035 * thick, 0.032 * thick), (elbow, wrist, 0.032 * thick, 0.026 * thick)]
        for start, end, start_width, end_width in parts:
            self._limb(start, end, start_width * 1.12, end_width * 1.12, _shade(cloth, light * 0.72))
        for start, end, start_width, end_width in parts:
            self._limb(start, end, start_width, end_width, _shade(cloth, light * 0.95))
            if person.pattern in ("stripes", "wide_stripes", "checks") and not contrast:
                self._bands(start, end, start_width, light, 2 if person.pattern == "wide_stripes" else 3)

    def _bands(self, start: Point, end: Point, width: float, light: float, count: int) -> None:
        """Paint ``count`` rings of the accent color around a sleeve."""
        for index in range(count):
            a, b = (index + 0.5) / count, (index + 0.95) / count
            first = tuple(p + a * (q - p) for p, q in zip(start, end, strict=True))
            second = tuple(p + b * (q - p) for p, q in zip(start, end, strict=True))
            line = [self._at(*first), self._at(*second)]
            fill = _shade(self.person.accent, light * 0.95)
            self.brush.line(line, fill=fill, width=max(1, round(1.75 * width * self.unit)))

    def _hand_bag(self, wrist: Point) -> None:
        """Paint a handbag or shopping bag that hangs from ``wrist``."""
        person, unit = self.person, self.unit
        x, y = self._at(*wrist)
        if person.bag == "handbag":
            self.brush.arc(
                (x - 0.04 * unit, y - 0.02 * unit, x + 0.04 * unit, y + 0.11 * unit),
                180,
                360,
                fill=_shade(person.bag_color, 0.7),
                width=max(1, round(0.012 * unit)),
            )
            self._box((x, y + 0.085 * unit), 0.058 + 0.02 * abs(self.sin), 0.048, person.bag_color, 0.014)
        else:
            corners = ((-0.025, 0.02), (0.025, 0.02), (0.066, 0.075), (0.058, 0.17), (-0.058, 0.17), (-0.066, 0.075))
            self.brush.polygon([(x + dx * unit, y + dy * unit) for dx, dy in corners], fill=person.bag_color)
            self._box((x, y + 0.12 * unit), 0.03, 0.022, _shade(person.bag_color, 0.75), 0.006)

    # -- head ----------------------------------------------------------------------------------------------------

    def _hair_behind(self) -> None:
        """Paint hair that falls down the back."""
        person = self.person
        if person.hair == "long":
            top, low = (0, _HEAD_CENTER, -0.02), (0, 0.8, -0.05)
            self._limb(top, low, self._half_width(0.052, 0.04), self._half_width(0.062, 0.035), person.hair_color)
        elif person.hair == "tail":
            self._limb((0, _HEAD_CENTER + 0.015, -0.06), (0, 0.82, -0.075), 0.018, 0.012, person.hair_color)

    def _head(self) -> None:
        person = self.person
        dark_skin = _shade(person.skin, 0.82)
        self._limb((0, _CHIN + 0.02, 0.0), (0, 0.825, -0.005), 0.026, 0.032, dark_skin)
        if person.hair == "hood":
            self._oval(self._at(0, _HEAD_CENTER - 0.008, -0.012), self._half_width(0.062, 0.068), 0.078, person.upper)
        if person.hair == "bun":
            self._oval(self._at(0, _HEAD_CENTER + 0.058, -0.045), 0.025, 0.022, person.hair_color)

        center = self._at(0, _HEAD_CENTER, 0.0)
        skull = self._half_width(0.047, 0.056)
        hairless = person.hair in ("bald", "hood")
        back_of_head = dark_skin if person.hair == "bald" else person.hair_color
        if person.hair == "hood":
            back_of_head = person.upper
        if not hairless:
            self._oval(self._at(0, _HEAD_CENTER + 0.008, -0.008), skull + 0.005, 0.07, back_of_head)
        else:
            self._oval(center, skull, 0.066, person.skin if self.cos > -0.2 and person.hair != "hood" else back_of_head)
        if self.cos > -0.25:
            self._face()
        if self.pose.pitch > _FROM_ABOVE and not hairless:
            crown = self._at(0, _HEAD_CENTER + 0.04, -0.01)
            self._oval(crown, skull + 0.002, 0.045, back_of_head)
        self._hat()

    def _face(self) -> None:
        person = self.person
        narrow = 0.72 + 0.28 * max(self.cos, 0.0)
        face = self._at(0, _HEAD_CENTER - 0.014, 0.02)
        self._oval(face, 0.042 * narrow, 0.052, person.skin)
        eye_color = _shade(person.skin, 0.35)
        for side in (-1, 1):
            if -side * self.sin > -0.6:
                self._oval(self._at(0.017 * side, _HEAD_CENTER - 0.004, 0.05), 0.007, 0.005, eye_color)
        mouth = self._at(0, _HEAD_CENTER - 0.04, 0.05)
        self._oval(mouth, 0.012 * narrow, 0.004, _shade(person.skin, 0.6))

    def _hat(self) -> None:
        person, unit = self.person, self.unit
        if person.hair not in ("cap", "beanie"):
            return
        rx = self._half_width(0.054, 0.062)
        x, y = self._at(0, _HEAD_CENTER + 0.018, -0.004)
        crown = 0.062 if person.hair == "cap" else 0.074
        box = (x - rx * unit, y - crown * unit, x + rx * unit, y + crown * unit)
        self.brush.chord(box, 180, 360, fill=person.hat_color)
        if person.hair == "cap":
            brim_at = self._at(0, _HEAD_CENTER + 0.016, 0.075)
            if self.cos > -0.3:
                self._oval(brim_at, self._half_width(0.045, 0.04), 0.012, _shade(person.hat_color, 0.75))
        else:
            self._box((x, y - 0.004 * unit), rx * 1.04, 0.014, _shade(person.hat_color, 0.8), 0.008)


def _shade(color: Color, light: float) -> Color:
    """Scale the brightness of ``color`` by ``light``."""
    red, green, blue = color
    return (min(255, int(red * light)), min(255, int(green * light)), min(255, int(blue * light)))
