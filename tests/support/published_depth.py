"""What the data's description states for two trivial predictors, made before and apart from this package."""

ABS_REL = {  # group: (constant, ramp)
    "osd_kinect": (0.205, 0.076),
    "kitti_lidar": (0.588, 0.359),
    "nyu": (0.340, 0.248),
    "priorda": (0.262, 0.181),
    "lingbot": (1.527, 0.880),
    "tabletop": (0.433, 0.300),
    "gqcnn": (0.066, 0.045),
    "middlebury": (0.402, 0.235),
    "sunrgbd": (0.091, 0.091),
    "tum": (0.304, 0.330),
    "slambook": (0.643, 0.374),
    "fusion": (0.261, 0.217),
    "fusion_7scenes": (0.492, 0.138),
}
